"""One module a chapter: the experiment behind it, and the parameters a reader may change."""
