"""The ledger: verdicts are computed, every gate trips, and the page says what the records say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from v41lib import ledger
from v41lib.experiments import map as experiment
from v41lib.ledger import Claim, LedgerError, Record
from v41lib.provenance import experiment_hash


def claim(**changes: object) -> Claim:
    values = {
        "id": "layers-full",
        "chapter": "01",
        "claim": "There are four.",
        "refuted_by": "five",
        "source": "report",
        "kind": "derived",
        "published": 4,
    }
    return Claim.model_validate(values | changes)


def record(**changes: object) -> Record:
    params = experiment.Params()
    values = {
        "id": "layers-full",
        "value": 4,
        "chapter": "01",
        "experiment": "v41lib.experiments.map.settled",
        "params": params.model_dump(mode="json"),
        "hash": experiment_hash(experiment.settled, params),
        "profile": "ci",
        "device": "CPU",
        "versions": {"torch": "2", "python": "3"},
        "date": "2026-01-01",
    }
    return Record.model_validate(values | changes)


@pytest.mark.parametrize(
    ("changes", "value", "holds"),
    [
        ({"published": 552e9, "tolerance": 0.5e9}, 551_880_835_184, True),
        ({"published": 552e9, "tolerance": 0.5e9}, 552_500_000_001, False),
        ({"published": 763205315794}, 763205315795, False),
        ({"published": True}, True, True),
        ({"published": True}, False, False),
        ({"published": True}, 1, False),  # a number is not an answer to yes or no
        ({"published": None, "max": 16384}, 16384, True),
        ({"published": None, "max": 16384}, 16385, False),
        ({"published": None, "min": 0.9, "max": 1.0}, 0.89, False),
    ],
)
def test_a_claim_holds_within_its_tolerance(changes: dict[str, object], value: float, holds: bool) -> None:
    assert claim(**changes).holds(value) is holds


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("derived", 4, "reproduced"),
        ("true-scale", 4, "reproduced"),
        ("small-model", 4, "consistent"),
        ("derived", 5, "contradicted"),
        ("small-model", 5, "contradicted"),
    ],
)
def test_verdict_of_a_record(kind: str, value: int, expected: str) -> None:
    assert ledger.verdict(claim(kind=kind), record(value=value)) == expected


def test_verdict_without_a_record() -> None:
    assert ledger.verdict(claim(), None) == "pending"
    assert ledger.verdict(claim(kind="needs-weights", published=None), None) == "open"


def test_a_claim_must_be_falsifiable() -> None:
    with pytest.raises(ValueError, match="published value, a min or a max"):
        claim(published=None)


def test_values_are_shown_in_their_unit() -> None:
    billions = claim(published=552_000_000_000, scale=1e9, digits=2, unit="B")
    assert billions.show_published() == "552 B"
    assert billions.show(551_880_835_184) == "551.88 B"
    assert claim(published=None, min=1, max=2, unit="x").show_published() == "at least 1 x, at most 2 x"
    assert claim(published=True).show_published() == "yes"


def write_claims(path: Path, *entries: dict[str, object]) -> Path:
    path.write_text(json.dumps(list(entries)), encoding="utf-8")  # JSON is YAML
    return path


def test_claims_are_read_in_order_and_checked(tmp_path: Path) -> None:
    first, second = claim().model_dump(), claim(id="other").model_dump()
    assert list(ledger.load_claims(write_claims(tmp_path / "c.yml", first, second))) == ["layers-full", "other"]
    with pytest.raises(LedgerError, match="layers-full is used twice"):
        ledger.load_claims(write_claims(tmp_path / "c.yml", first, first))
    with pytest.raises(LedgerError, match=r"entry 2 \(other\)(.|\n)*kind"):
        ledger.load_claims(write_claims(tmp_path / "c.yml", first, second | {"kind": "guessed"}))
    with pytest.raises(LedgerError, match="colour"):
        ledger.load_claims(write_claims(tmp_path / "c.yml", first | {"colour": "red"}))


def test_the_audit_passes_on_what_fits() -> None:
    claims = {c.id: c for c in (claim(), claim(id="later", chapter="09"))}
    assert ledger.audit(claims, {"layers-full": record()}, {"01"}) == []


@pytest.mark.parametrize(
    ("claims", "records", "complaint"),
    [
        ([claim()], [], "chapter 01 exists but has no record"),
        ([], [record()], "no such claim"),
        ([claim(kind="needs-weights", published=None)], [record()], "said to need the weights"),
        ([claim(chapter="02")], [record()], "made by chapter 01, claimed for 02"),
        ([claim()], [record(hash="0" * 16)], "has changed since"),
        ([claim()], [record(params={"profile": "ci", "length": 7, "seed": 0})], "has changed since"),
        ([claim()], [record(experiment="v41lib.experiments.map.gone")], "has changed since"),
        ([claim()], [record(params={"gone": 1})], "has changed since"),
    ],
)
def test_each_gate_trips(claims: list[Claim], records: list[Record], complaint: str) -> None:
    found = ledger.audit({c.id: c for c in claims}, {r.id: r for r in records}, {"01"})
    assert len(found) == 1
    assert complaint in found[0]


def test_a_stale_long_run_is_shown_and_does_not_stop_the_build() -> None:
    old = record(profile="full", hash="0" * 16)
    assert ledger.audit({"layers-full": claim()}, {"layers-full": old}, {"01"}) == []
    assert ledger.is_stale(old)
    assert "made before its code last changed" in ledger.to_html({"layers-full": claim()}, {"layers-full": old}, {})


def four_and_three(params: experiment.Params) -> dict[str, object]:
    return {"layers-full": 4, "layers-local": ledger.Measured(3, spread=0.5, seeds=2)}


def test_settling_records_the_value_and_its_conditions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "build_path", lambda *parts: tmp_path.joinpath(*parts))
    params = experiment.Params()
    table = ledger.settle(four_and_three, params)
    assert list(table["verdict"]) == ["reproduced", "contradicted"]
    records = ledger.load_records(tmp_path / "records" / "ci")
    assert records["layers-full"].value == 4
    assert records["layers-full"].hash == experiment_hash(four_and_three, params)
    assert records["layers-local"].spread == 0.5
    with pytest.raises(LedgerError, match="no claim layers-fulll"):
        ledger.settle(lambda params: {"layers-fulll": 4}, params)


def test_an_unreadable_record_is_named(tmp_path: Path) -> None:
    (tmp_path / "layers-full.json").write_text("{}", encoding="utf-8")
    with pytest.raises(LedgerError, match=r"layers-full\.json: not a record"):
        ledger.load_records(tmp_path)
    (tmp_path / "layers-full.json").write_text(record(id="other").model_dump_json(), encoding="utf-8")
    with pytest.raises(LedgerError, match="holds the record of other"):
        ledger.load_records(tmp_path)


def test_the_page_links_to_the_cell_and_escapes() -> None:
    html = ledger.to_html({"layers-full": claim(claim="a < b & c")}, {"layers-full": record()}, {"01": "01_map"})
    assert 'href="01_map.html#settles-layers-full"' in html
    assert "a &lt; b &amp; c" in html
    assert 'data-verdict="reproduced" data-chapter="01"' in html
    assert "2026-01-01, profile ci, CPU" in html


def test_the_ledger_as_json_holds_every_claim() -> None:
    entries = json.loads(ledger.to_json())
    assert [entry["id"] for entry in entries] == list(ledger.load_claims())
    assert {entry["verdict"] for entry in entries} <= set(ledger.VERDICTS)
