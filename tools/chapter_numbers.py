"""A Sphinx extension: a chapter's number on its page is the one in its file name, ``08_name`` is 8.

Sphinx numbers by position in the table of contents. While chapters are missing in between, and in every link made
before they were written, that would be another number than the ledger and `v41 run NN` use.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

NUMBERED = re.compile(r"(\d\d)_")


def renumber(env: Any) -> None:
    """Put each chapter's own number first in the section numbers that Sphinx has assigned."""
    for page, numbers in env.toc_secnumbers.items():
        if not (match := NUMBERED.match(page)):
            continue
        chapter = int(match.group(1))
        env.toc_secnumbers[page] = {anchor: (chapter, *rest[1:]) if rest else rest for anchor, rest in numbers.items()}
        titled = [
            env.titles[page],
            *env.tocs[page].findall(lambda node: "secnumber" in getattr(node, "attributes", {})),
        ]
        for node in titled:
            if node.get("secnumber"):
                node["secnumber"] = [chapter, *node["secnumber"][1:]]


def setup(_app: Any) -> dict[str, bool]:
    """Called by Sphinx. Renumbers after sections are numbered, whoever does that, and before figures, which follow."""
    from sphinx.environment.collectors.toctree import TocTreeCollector

    assign: Callable[..., list[str]] = TocTreeCollector.assign_figure_numbers

    def assign_figure_numbers(self: Any, env: Any) -> list[str]:
        renumber(env)
        return assign(self, env)

    TocTreeCollector.assign_figure_numbers = assign_figure_numbers  # type: ignore[method-assign]
    return {"parallel_read_safe": True, "parallel_write_safe": True}
