"""Where the library's data lies: beside the package in a checkout, inside it in an installed wheel."""

from __future__ import annotations

import os
from pathlib import Path


def data_path(*parts: str) -> Path:
    """The path of a file or folder of ``data/``. Raises ``FileNotFoundError`` that names it when it is missing."""
    package = Path(__file__).resolve().parent
    root = package / "data"  # where the wheel puts it
    if not root.is_dir():
        root = package.parent / "data"
    path = root.joinpath(*parts)
    if not path.exists():
        raise FileNotFoundError(
            f"{'/'.join(('data', *parts))} is missing: reinstall v41lib, or restore it in the checkout"
        )
    return path


def build_path(*parts: str) -> Path:
    """Where fresh results go: ``V41_BUILD`` if set, else ``build/`` of the checkout or of the working folder."""
    if chosen := os.environ.get("V41_BUILD"):
        return Path(chosen, *parts)
    checkout = Path(__file__).resolve().parent.parent
    root = checkout if (checkout / "book" / "_toc.yml").is_file() else Path.cwd()
    return root.joinpath("build", *parts)
