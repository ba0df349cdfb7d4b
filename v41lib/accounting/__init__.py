"""Closed forms for what a configuration costs: no weights needed, usable at released size."""
