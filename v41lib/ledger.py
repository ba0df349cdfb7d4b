"""The ledger: published claims, our records, and verdicts that are computed and never typed.

``data/claims.yml`` states what is claimed and what would refute it. A chapter settles its claims with :func:`settle`;
each becomes a record that carries the value, its conditions and the hash of the experiment. Fresh records go to
``build/records``; ``make accept`` copies them to ``data/records``, which the front page reads.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, get_args

import pandas as pd
import torch
import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from v41lib.experiments.base import BaseParams
from v41lib.provenance import experiment_hash
from v41lib.resources import build_path, data_path

Kind = Literal["derived", "true-scale", "small-model", "needs-weights"]
Verdict = Literal["reproduced", "consistent", "contradicted", "open", "pending"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
Value = bool | int | float


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Claim(_Frozen):
    """One disputable claim. It holds when our value is within ``tolerance`` of ``published``, or inside [min, max].

    A claim that something simply is so has ``published: true``.
    """

    id: str = Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")
    chapter: str = Field(pattern=r"^\d\d$")
    claim: str
    refuted_by: str
    source: str
    kind: Kind
    published: Value | None = None
    tolerance: float = Field(default=0.0, ge=0)
    min: float | None = None
    max: float | None = None
    unit: str = ""
    digits: int | None = Field(default=None, ge=0)
    scale: float = Field(default=1.0, gt=0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        bounded = self.min is not None or self.max is not None
        if self.kind != "needs-weights" and self.published is None and not bounded:
            raise ValueError(f"claim {self.id}: must have a published value, a min or a max to be held to")
        return self

    def holds(self, value: Value) -> bool:
        """Whether our value supports the claim."""
        if isinstance(self.published, bool):
            return value is self.published
        if self.min is not None or self.max is not None:
            low = -float("inf") if self.min is None else self.min
            high = float("inf") if self.max is None else self.max
            return low <= value <= high
        return self.published is not None and abs(value - self.published) <= self.tolerance

    def show(self, value: Value | None) -> str:
        """A value of this claim as text, in its unit."""
        if value is None:
            return ""
        if isinstance(value, bool):
            return "yes" if value else "no"
        scaled = value / self.scale if self.scale != 1 else value
        digits = self.digits if self.digits is not None else (0 if float(scaled).is_integer() else 2)
        return f"{scaled:,.{digits}f} {self.unit}".strip()

    def show_published(self) -> str:
        """What was published, as text: the value, or the bounds that our measurement must respect."""
        if self.published is not None:
            exact = not isinstance(self.published, bool) and (self.published / self.scale).is_integer()
            return self.model_copy(update={"digits": 0}).show(self.published) if exact else self.show(self.published)
        parts = [f"at least {self.show(self.min)}"] if self.min is not None else []
        parts += [f"at most {self.show(self.max)}"] if self.max is not None else []
        return ", ".join(parts)


class Record(_Frozen):
    """What we measured for one claim, and under which conditions."""

    id: str
    value: Value
    spread: float | None = None
    seeds: int = 1
    chapter: str
    experiment: str
    params: dict[str, Any]
    hash: str
    profile: str
    device: str
    versions: dict[str, str]
    date: str


class Measured(NamedTuple):
    """A value with its spread over seeds, for claims about models that learned."""

    value: Value
    spread: float | None = None
    seeds: int = 1


class LedgerError(ValueError):
    """Claims and records that do not fit together."""


def load_claims(path: Path | None = None) -> dict[str, Claim]:
    """Every claim by id, in file order. Raises ``LedgerError`` for an id used twice or an entry off the schema."""
    path = path or data_path("claims.yml")
    claims: dict[str, Claim] = {}
    for number, entry in enumerate(yaml.safe_load(path.read_text(encoding="utf-8")), start=1):
        try:
            claim = Claim.model_validate(entry)
        except ValueError as error:
            raise LedgerError(f"{path.name}, entry {number} ({entry.get('id', 'no id')}): {error}") from error
        if claim.id in claims:
            raise LedgerError(f"{path.name}, entry {number}: the id {claim.id} is used twice")
        claims[claim.id] = claim
    return claims


def verdict(claim: Claim, record: Record | None) -> Verdict:
    """The verdict on a claim. Without a record it is *open* (the weights are needed) or *pending* (no chapter yet)."""
    if claim.kind == "needs-weights":
        return "open"
    if record is None:
        return "pending"
    if not claim.holds(record.value):
        return "contradicted"
    return "consistent" if claim.kind == "small-model" else "reproduced"


def settle(experiment: Callable[[Any], Mapping[str, Value | Measured]], params: BaseParams) -> pd.DataFrame:
    """Run an experiment and record what it returns: claim ids to values.

    Returns a table of claim, published value, ours and verdict; no verdict is given where a reader has changed the
    profile's parameters, since the claim is then asked of something else. Raises ``LedgerError`` for an id that is no
    claim.
    """
    values = experiment(params)
    changed = params != type(params).for_profile(params.profile)
    claims = load_claims()
    unknown = [name for name in values if name not in claims]
    if unknown:
        raise LedgerError(f"no claim {', '.join(unknown)} in claims.yml")
    folder = build_path("records", params.profile)
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for name, found in values.items():
        claim, measured = claims[name], found if isinstance(found, Measured) else Measured(found)
        record = Record(
            id=name,
            value=measured.value,
            spread=measured.spread,
            seeds=measured.seeds,
            chapter=claim.chapter,
            experiment=f"{experiment.__module__}.{experiment.__qualname__}",
            params=params.model_dump(mode="json"),
            hash=experiment_hash(experiment, params),
            profile=params.profile,
            device=device_name(params.device),
            versions=versions(),
            date=datetime.now(UTC).date().isoformat(),
        )
        temporary = folder / f".{name}.partial"
        temporary.write_text(record.model_dump_json(indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, folder / f"{name}.json")
        found_so = "parameters changed" if changed else verdict(claim, record)
        rows.append([claim.claim, claim.show_published(), claim.show(record.value), found_so])
    return pd.DataFrame(rows, columns=["claim", "published", "ours", "verdict"])


def load_records(*folders: Path) -> dict[str, Record]:
    """The records in ``folders`` by claim id; a later folder's replaces an earlier one's."""
    records = {}
    for folder in folders:
        for path in sorted(folder.glob("*.json")) if folder.is_dir() else []:
            try:
                record = Record.model_validate_json(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise LedgerError(f"{path.name}: not a record ({error})") from error
            if path.stem != record.id:
                raise LedgerError(f"{path.name} holds the record of {record.id}")
            records[record.id] = record
    return records


def accepted_records() -> dict[str, Record]:
    """The records that were accepted into ``data/records``."""
    return load_records(data_path() / "records")


def device_name(device: str) -> str:
    """The name of a device for a reader: the GPU's own, or CPU with its thread count."""
    if device.startswith("cuda"):
        return str(torch.cuda.get_device_name(device))
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' if threads > 1 else ''}"


def versions() -> dict[str, str]:
    """The versions that a number may depend on."""
    import numpy as np

    from v41lib import __version__

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "v41lib": __version__,
    }


def audit(claims: Mapping[str, Claim], records: Mapping[str, Record], chapters: set[str]) -> list[str]:
    """What keeps the ledger from being true, one line a problem; an empty list lets the build pass.

    A claim of an existing chapter without a record, a record without a claim or under another claim's chapter, a
    record of a claim that needs the weights, and a ``ci`` record whose experiment has changed since.
    """
    problems = []
    for claim in claims.values():
        if claim.kind != "needs-weights" and claim.chapter in chapters and claim.id not in records:
            problems.append(f"claim {claim.id}: chapter {claim.chapter} exists but has no record of it")
    for record in records.values():
        claim_of = claims.get(record.id)
        if claim_of is None:
            problems.append(f"record {record.id}: no such claim")
        elif claim_of.kind == "needs-weights":
            problems.append(f"record {record.id}: its claim is said to need the weights")
        elif claim_of.chapter != record.chapter:
            problems.append(f"record {record.id}: made by chapter {record.chapter}, claimed for {claim_of.chapter}")
        elif record.profile == "ci" and is_stale(record):
            problems.append(f"record {record.id}: {record.experiment} has changed since; run `make accept`")
    return problems


def is_stale(record: Record) -> bool:
    """Whether the experiment behind a record (its parameters or the code it reaches) has changed since it was made."""
    import importlib

    module_name, _, function = record.experiment.rpartition(".")
    try:
        module = importlib.import_module(module_name)
        # The parameters are not validated: whether a GPU is here says nothing about a record that was made on one.
        known = set(record.params) == set(module.Params.model_fields)
        return not known or experiment_hash(getattr(module, function), record.params) != record.hash
    except (ImportError, AttributeError, ValueError):
        return True


def table(claims: Mapping[str, Claim] | None = None, records: Mapping[str, Record] | None = None) -> pd.DataFrame:
    """The whole ledger, one row a claim: what is claimed and by whom, what would refute it, ours, the verdict."""
    claims = load_claims() if claims is None else claims
    records = accepted_records() if records is None else records
    rows = []
    for claim in claims.values():
        record = records.get(claim.id)
        rows.append(
            {
                "id": claim.id,
                "chapter": claim.chapter,
                "claim": claim.claim,
                "published": claim.show_published(),
                "ours": claim.show(record.value) if record else "",
                "verdict": verdict(claim, record),
                "kind": claim.kind,
                "source": claim.source,
                "refuted by": claim.refuted_by,
            }
        )
    return pd.DataFrame(rows)


def to_html(claims: Mapping[str, Claim], records: Mapping[str, Record], pages: Mapping[str, str]) -> str:
    """The ledger as a table for the front page; ``pages`` maps a chapter's number to its page's name.

    Each verdict links to the cell that settled it; what would refute the claim, the source and the conditions unfold.
    """
    rows = [_html_row(claim, records.get(claim.id), pages.get(claim.chapter)) for claim in claims.values()]
    head = "".join(f"<th>{name}</th>" for name in ("Claim", "Published", "Ours", "Verdict"))
    return f'<table class="ledger"><thead><tr>{head}</tr></thead><tbody>\n{"".join(rows)}</tbody></table>'


def _html_row(claim: Claim, record: Record | None, page: str | None) -> str:
    found = verdict(claim, record)
    badge = f'<span class="verdict {found}">{found}</span>'
    if page and record:
        badge = f'<a href="{page}.html#settles-{claim.id}">{badge}</a>'
    facts = {"Refuted by": claim.refuted_by, "Source": claim.source, "Kind": claim.kind}
    if record:
        spread = f" ± {claim.show(record.spread)} over {record.seeds} seeds" if record.spread is not None else ""
        stack = f"torch {record.versions['torch']}, Python {record.versions['python']}"
        facts["Measured"] = f"{record.date}, profile {record.profile}, {record.device}, {stack}{spread}"
        facts["Experiment"] = f"{record.experiment}, hash {record.hash}"
        if is_stale(record):
            facts["Note"] = "made before its code last changed; to be run again"
    else:
        facts["Chapter"] = f"{claim.chapter}, not written yet" if found == "pending" else claim.chapter
    details = "".join(f"<dt>{escape(name)}</dt><dd>{escape(fact)}</dd>" for name, fact in facts.items())
    cells = [
        f"<details><summary>{escape(claim.claim)}</summary><dl>{details}</dl></details>",
        escape(claim.show_published()),
        escape(claim.show(record.value)) if record else "",
        badge,
    ]
    labels = ("Claim", "Published", "Ours", "Verdict")
    row = "".join(f'<td data-label="{label}">{cell}</td>' for label, cell in zip(labels, cells, strict=True))
    return f'<tr data-verdict="{found}" data-chapter="{claim.chapter}">{row}</tr>\n'


def to_json() -> str:
    """The ledger as JSON: each claim with its record (or null) and verdict."""
    records = accepted_records()
    out = []
    for claim in load_claims().values():
        record = records.get(claim.id)
        out.append(
            claim.model_dump(mode="json")
            | {"verdict": verdict(claim, record), "record": record.model_dump(mode="json") if record else None}
        )
    return json.dumps(out, indent=1)
