"""Chapter 00: the ledger of claims and verdicts, from the accepted records."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from v41lib import ledger
from v41lib.experiments.base import BaseParams


class Params(BaseParams):
    """The front page has nothing to vary."""


def pages(book: Path | None = None) -> dict[str, str]:
    """The chapters that exist: number to page name, from the notebooks in the book's folder (this one by default)."""
    return {path.stem[:2]: path.stem for path in sorted((book or Path.cwd()).glob("[0-9][0-9]_*.ipynb"))}


def counts() -> dict[str, int]:
    """How many claims there are, and how many have each verdict."""
    claims, records = ledger.load_claims(), ledger.accepted_records()
    verdicts = Counter(ledger.verdict(claim, records.get(claim.id)) for claim in claims.values())
    return {"claims": len(claims)} | {name: verdicts[name] for name in ledger.VERDICTS}


def rendered() -> str:
    """The ledger as HTML."""
    return ledger.to_html(ledger.load_claims(), ledger.accepted_records(), pages())
