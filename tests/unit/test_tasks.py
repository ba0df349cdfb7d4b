"""Text and tasks. Every answer is derived again from the ids alone: what was said before, and where."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
import torch

import v41lib.training.tasks
from v41lib.resources import data_path
from v41lib.training.tasks import (
    ASK,
    ENDS,
    KEYS,
    VALUES,
    VOCAB,
    Batch,
    Corpus,
    Parity,
    check,
    corpus,
    echo,
    heldout_windows,
    join,
    manifest,
    pure_recall,
    pure_two_hop,
    recall,
    stream,
    text_batch,
    two_hop,
)

DATA = (torch.arange(5000) * 7919 % 251).to(torch.uint8)

TASKS: dict[str, Callable[[torch.Generator], Batch]] = {
    "text": lambda generator: text_batch(DATA, 4, 96, generator),
    "pure_recall": lambda generator: pure_recall(4, 96, generator),
    "recall": lambda generator: recall(DATA, 4, 96, generator),
    "pure_two_hop": lambda generator: pure_two_hop(4, 96, generator),
    "two_hop": lambda generator: two_hop(DATA, 4, 96, generator),
}


def same(one: Batch, other: Batch) -> bool:
    return all(torch.equal(getattr(one, field.name), getattr(other, field.name)) for field in fields(Batch))


def places(mask: torch.Tensor) -> list[int]:
    """Places of ids, not of targets: target s is at place s + 1."""
    return (mask.nonzero().flatten() + 1).tolist()


@pytest.fixture(scope="module")
def installed() -> Corpus:
    return corpus()


# --- the corpus


def test_the_installed_corpus_is_the_recorded_one(installed: Corpus) -> None:
    check(installed)
    recorded = data_path("corpus.json").read_text(encoding="utf-8")
    assert json.loads(recorded)["digest"] == installed.digest
    assert recorded == manifest(installed)


def test_files_are_split_whole_without_overlap_and_in_order(installed: Corpus) -> None:
    names = [file.name for file in installed.files]
    assert names == sorted(set(names))
    assert {name.split("/")[0] for name in names} == {"sympy", "networkx", "docutils"}
    assert not any({"tests", "testing"} & set(name.split("/")) for name in names)
    assert all(0 < file.size <= 300_000 for file in installed.files)
    for split, text in (("train", installed.train), ("heldout", installed.heldout)):
        sizes = [file.size + 1 for file in installed.files if file.split == split]
        assert text.dtype == torch.uint8 and len(text) == sum(sizes)
        assert text[torch.tensor(sizes).cumsum(0) - 1].eq(0).all()  # where each file ends
    assert 0.02 < len(installed.heldout) / len(installed.train) < 0.1


def test_a_changed_a_missing_and_an_unknown_file_are_named(
    installed: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = json.loads(manifest(installed))
    name = recorded["files"][3][0]
    path = tmp_path / "corpus.json"
    monkeypatch.setattr(v41lib.training.tasks, "data_path", lambda *_: path)

    def refused(files: list[list[object]]) -> str:
        path.write_text(json.dumps({**recorded, "packages": {"docutils": "0.1"}, "files": files}))
        with pytest.raises(ValueError, match=r"of docutils 0\.1, installed is 0\.\d+.*make setup") as error:
            check(installed)
        return str(error.value)

    files = recorded["files"]
    assert refused(files[:3] + files[4:]).startswith(f"{name} is not recorded")
    assert refused([*files[:3], [name, 1, *files[3][2:]], *files[4:]]).startswith(f"{name} has changed")
    assert refused([["docutils/aaa.py", 1, "0", "train"], *files]).startswith("docutils/aaa.py is missing")


def test_a_package_that_is_not_installed_is_named() -> None:
    with pytest.raises(ValueError, match=r"package no_such_package is not installed.*make setup"):
        corpus(("sympy", "no_such_package"))


def test_a_readers_folder(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "part").mkdir()
    contents = {f"part/{number}.md": f"text {number}".encode() for number in range(60)} | {"a.py": b"\xff\x00"}
    unread = {"tests/b.py": b"x", "empty.py": b"", "c.csv": b"x", "large.txt": bytes(300_001)}
    for name, content in (contents | unread).items():
        (tmp_path / name).write_bytes(content)
    own = corpus(folder=tmp_path)
    assert [(file.name, file.size) for file in own.files] == [(name, len(contents[name])) for name in sorted(contents)]
    for split, text in (("train", own.train), ("heldout", own.heldout)):
        expected = b"".join(contents[file.name] + b"\0" for file in own.files if file.split == split)
        assert bytes(text.tolist()) == expected
    with pytest.raises(ValueError, match="no installed package"):
        manifest(own)
    with pytest.raises(ValueError, match=r"a\.py is not recorded"):
        check(own)


def test_a_folder_without_text_or_without_a_split_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no text file"):
        corpus(folder=tmp_path / "absent")
    with pytest.raises(ValueError, match="no text file"):
        corpus(folder=tmp_path)
    (tmp_path / "one.txt").write_text("one")
    with pytest.raises(ValueError, match="none of the 1 text files falls to the split heldout"):
        corpus(folder=tmp_path)


# --- what all batches have in common


@pytest.mark.parametrize("task", TASKS)
def test_a_step_can_be_drawn_again_and_no_other_is_like_it(task: str) -> None:
    draw = TASKS[task]
    batch = draw(stream(3, "train", 7))
    assert same(batch, draw(stream(3, "train", 7)))
    for other in (stream(3, "train", 8), stream(4, "train", 7), stream(3, "heldout", 7)):
        assert not torch.equal(batch.ids, draw(other).ids)


@pytest.mark.parametrize("task", TASKS)
def test_types_shapes_and_weights(task: str) -> None:
    batch = TASKS[task](stream(0, "train", 0))
    assert batch.ids.shape == (4, 97) and batch.ids.dtype == torch.int64
    assert batch.weight.shape == (4, 96) and batch.weight.dtype == torch.float32
    for mask in (batch.answer, batch.hop):
        assert mask.shape == (4, 96) and mask.dtype == torch.bool
    assert batch.ids.min() >= 0 and batch.ids.max() <= ASK < VOCAB
    text = 0.0 if task.startswith("pure") else 1.0
    expected = torch.where(batch.ids[:, 1:] < 256, text, torch.where(batch.answer | batch.hop, 4.0, 0.0))
    assert torch.equal(batch.weight, expected)
    assert batch.hop.any() == (task == "pure_two_hop")


def test_join_keeps_rows_in_order_and_refuses_other_lengths() -> None:
    one, two = TASKS["text"](stream(0, "train", 0)), TASKS["pure_two_hop"](stream(0, "train", 1))
    both = join([one, two])
    for field in fields(Batch):
        assert torch.equal(getattr(both, field.name), torch.cat([getattr(one, field.name), getattr(two, field.name)]))
    with pytest.raises(ValueError, match=r"lengths \[10, 96\]"):
        join([one, heldout_windows(DATA, 10, 2)])
    with pytest.raises(ValueError, match=r"lengths \[\]"):
        join([])


def test_text_windows_are_pieces_of_the_data_to_both_ends() -> None:
    data = torch.arange(20, dtype=torch.uint8)
    batch = text_batch(data, 200, 15, stream(0, "train", 0))
    assert batch.ids.diff(dim=1).eq(1).all()
    assert batch.ids[:, 0].unique().tolist() == [0, 1, 2, 3, 4]
    assert batch.weight.eq(1).all() and not batch.answer.any()
    with pytest.raises(ValueError, match=r"2 windows of 20 \+ 1 bytes out of 20"):
        text_batch(data, 2, 20, stream(0, "train", 0))


def test_heldout_windows_are_evenly_spaced() -> None:
    data = torch.arange(100, dtype=torch.uint8)
    assert heldout_windows(data, 9, 4).ids[:, 0].tolist() == [0, 30, 60, 90]
    assert heldout_windows(data, 9, 10).ids.flatten().tolist() == list(range(100))
    assert heldout_windows(data, 9, 1).ids[0].tolist() == list(range(10))
    for length, count in ((9, 11), (9, 0)):
        with pytest.raises(ValueError, match=rf"{count} windows of 9 \+ 1 bytes take {10 * count} bytes.*got 100"):
            heldout_windows(data, length, count)


# --- look-ups of one hop


def test_pure_recall_marks_exactly_what_was_said_before() -> None:
    batch = pure_recall(40, 97, stream(0, "train", 0), keys=5)
    begins = []
    for ids, answer in zip(batch.ids.tolist(), batch.answer, strict=True):
        begin = int(ids[0] < 256)
        begins.append(begin)
        assert all(token in (VALUES if (place - begin) % 2 else KEYS) for place, token in enumerate(ids[begin:], begin))
        said: dict[int, int] = {}
        expected = []
        for place in range(begin + 1, len(ids), 2):
            key, value = ids[place - 1 : place + 1]
            if key in said:
                assert said[key] == value
                expected.append(place)
            said[key] = value
        assert places(answer) == expected
        assert len(said) == 5
    assert 10 < sum(begins) < 30


def planted(batch: Batch, row: int) -> tuple[list[int], list[int], list[int]]:
    """The ids of a row, the places of its questions' answers, and of all other task symbols."""
    ids = batch.ids[row].tolist()
    answers = places(batch.answer[row])
    return ids, answers, [place for place, token in enumerate(ids) if token >= 256 and place not in answers]


@pytest.mark.parametrize("parity", ["even", "odd", "both"])
@pytest.mark.parametrize(
    ("length", "pairs", "distance"), [(96, 8, None), (97, 3, 80), (64, 2, 1), (40, 8, 8), (45, 8, 8)]
)
def test_recall_answers_follow_from_one_earlier_pair(
    parity: Parity, length: int, pairs: int, distance: int | None
) -> None:
    batch = recall(DATA, 20, length, stream(1, "train", 0), pairs, parity, distance)
    text = text_batch(DATA, 20, length, stream(1, "train", 0)).ids  # the text is drawn first
    assert torch.equal(batch.ids[batch.ids < 256], text[batch.ids < 256])
    found = []
    for row in range(20):
        ids, answers, others = planted(batch, row)
        assert len(answers) == pairs and len(others) == 3 * pairs
        asked = set()
        for answer in answers:
            key, value = ids[answer - 1], ids[answer]
            assert key in KEYS and value in VALUES
            said, again = (place for place, token in enumerate(ids) if token == key)
            assert again == answer - 1 and ids[said + 1] == value
            assert again - (said + 1) >= (length // 2 if distance is None else distance)
            asked.add(key)
            found.append(said % 2)
        assert len(asked) == pairs
    if parity != "both":
        assert set(found) == {int(parity == "odd")}


def test_places_of_pairs_and_questions_are_balanced_and_reach_the_ends() -> None:
    # With length 64, each of the regions has 17 places, one more than 8 pairs fill.
    for length, pairs in ((64, 8), (65, 8), (96, 8), (97, 2)):
        batch = recall(DATA, 1500, length, stream(2, "train", 0), pairs)
        keys = ((batch.ids >= KEYS.start) & (batch.ids < KEYS.stop)).nonzero()
        first = keys[:, 1] < length // 2
        for half in (keys[first, 1], keys[~first, 1]):
            assert abs((half % 2).float().mean().item() - 0.5) < 0.03
        assert keys[:, 1].min() == 0 and keys[:, 1].max() >= length - 2
    # The order of the questions says nothing about the order of the pairs.
    ordered = keys[:, 1].view(1500, 4)
    swapped = batch.ids.gather(1, ordered)[:, 0] == batch.ids.gather(1, ordered)[:, 3]
    assert 0.45 < swapped.float().mean() < 0.55


def test_recall_in_too_little_room_says_how_much_it_needs() -> None:
    def drawn(**changes: int) -> Batch:
        return recall(
            DATA, 1, **{"length": 36, "pairs": 8, "distance": 4, "generator": stream(0, "train", 0), **changes}
        )

    drawn()
    with pytest.raises(ValueError, match="with this distance the length must be at least 37"):
        drawn(distance=5)
    with pytest.raises(
        ValueError, match="8 facts take 17 tokens and 8 questions 17, but length = 35 with distance = 4"
    ):
        drawn(length=35)
    with pytest.raises(ValueError, match="distance = 0 must be at least 1 token"):
        drawn(distance=0)
    with pytest.raises(ValueError, match="pairs = 33 must be at most 32"):
        drawn(pairs=33)
    with pytest.raises(ValueError, match="recall: pairs = 0 must be at least 1"):
        drawn(pairs=0)
    with pytest.raises(ValueError, match="parity = 'uneven': must be even, odd or both"):
        recall(DATA, 1, 36, stream(0, "train", 0), parity="uneven")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"out of 30: .* the data at least as long as a window"):
        recall(DATA[:30], 1, 36, stream(0, "train", 0), distance=4)


# --- look-ups of two hops


def test_echo_asks_for_the_token_before_this_one() -> None:
    batch = echo(3, 20, stream(0, "train", 0))
    assert (batch.ids >= KEYS.start).all() and (batch.ids < ASK).all() and not batch.answer.any()
    asked = (batch.weight > 0).nonzero()
    assert len(asked) == 3 * 7 and (batch.weight[batch.weight > 0] == 4).all()
    for row, target in asked.tolist():  # the target s is at place s + 1; the token before the newest one is at s - 1
        assert batch.ids[row, target + 1] == batch.ids[row, target - 1]
    assert (batch.ids[:, 0::3] != batch.ids[:, 1::3]).any()


@pytest.mark.parametrize(("parity", "begins"), [("even", 0), ("odd", 1)])
def test_pure_recall_begins_where_it_is_told_to(parity: Parity, begins: int) -> None:
    ids = pure_recall(20, 64, stream(0, "train", 0), parity=parity).ids
    assert ((ids[:, 0] < 256).int() == begins).all() and (ids[:, begins] >= 256).all()
    with pytest.raises(ValueError, match=r"parity = 'none': must be even, odd or both"):
        pure_recall(1, 64, stream(0, "train", 0), parity="none")  # type: ignore[arg-type]


def test_pure_two_hop_marks_exactly_what_was_said_before() -> None:
    batch = pure_two_hop(40, 97, stream(0, "train", 0), chains=3)
    begins, kinds = [], {"k v": 0, "v w": 0, "ASK k w": 0}
    for row, ids in enumerate(batch.ids.tolist()):
        begin = int(ids[0] < 256)
        begins.append(begin)
        said: dict[int, int] = {}
        asked: set[int] = set()
        hops, answers = [], []
        place, items = begin, 0
        while place < len(ids):
            if asks := ids[place] == ASK:
                place += 1
            if place + 1 >= len(ids):
                break
            first, second = ids[place : place + 2]
            if asks:
                assert items >= 6 and said[said[first]] == second and first not in asked
                asked.add(first)
                answers.append(place + 1)
                kinds["ASK k w"] += 1
            else:
                assert (first in KEYS and second in VALUES) or (first in VALUES and second in ENDS)
                assert (items >= 6) == (first in said)
                if first in said:
                    assert said[first] == second
                    hops.append(place + 1)
                    kinds["k v" if first in KEYS else "v w"] += 1
                said[first] = second
            items += 1
            place += 2
        assert len(said) == 6 == len(set(said.values()))
        assert places(batch.answer[row]) == answers and places(batch.hop[row]) == hops
    assert 10 < sum(begins) < 30
    assert kinds["ASK k w"] > 0.9 * 3 * 40 and min(kinds["k v"], kinds["v w"]) > 0.4 * sum(kinds.values())


def test_pure_two_hop_needs_room_for_the_facts_and_a_question() -> None:
    assert pure_two_hop(50, 19, stream(0, "train", 0)).ids.shape == (50, 20)
    with pytest.raises(ValueError, match="length = 18 must be at least 19, for a filler, the 8 facts and a question"):
        pure_two_hop(1, 18, stream(0, "train", 0))


@pytest.mark.parametrize(("length", "chains", "distance"), [(96, 4, None), (97, 2, 70), (41, 4, 5), (50, 1, 1)])
def test_two_hop_answers_follow_from_two_earlier_facts(length: int, chains: int, distance: int | None) -> None:
    batch = two_hop(DATA, 60, length, stream(1, "train", 0), chains, distance)
    text = text_batch(DATA, 60, length, stream(1, "train", 0)).ids
    assert torch.equal(batch.ids[batch.ids < 256], text[batch.ids < 256])
    forward = 0
    for row in range(60):
        ids, answers, others = planted(batch, row)
        assert len(answers) == chains and len(others) == 6 * chains
        for answer in answers:
            ask, key, end = ids[answer - 2 : answer + 1]
            assert ask == ASK and key in KEYS and end in ENDS
            first = ids.index(key)
            value = ids[first + 1]
            assert value in VALUES and ids.count(key) == ids.count(value) == ids.count(end) == 2
            second = next(place for place, token in enumerate(ids) if token == value and place != first + 1)
            assert ids[second + 1] == end
            assert answer - 2 - (max(first, second) + 1) >= (length // 2 if distance is None else distance)
            assert abs(first - second) >= 3 * chains  # facts of all other chains, and text, between the two
            forward += first < second
    assert 0.3 < forward / (60 * chains) < 0.7


def test_two_hop_in_too_little_room_says_how_much_it_needs() -> None:
    with pytest.raises(ValueError, match=r"8 facts take 23 tokens and 4 questions 12.* length must be at least 53"):
        two_hop(DATA, 1, 40, stream(0, "train", 0))
    assert two_hop(DATA, 1, 40, stream(0, "train", 0), distance=7).answer.sum() == 4
    assert two_hop(DATA, 1, 53, stream(0, "train", 0), distance=20).answer.sum() == 4
    with pytest.raises(ValueError, match="two_hop: chains = 0 must be at least 1"):
        two_hop(DATA, 1, 40, stream(0, "train", 0), chains=0)
