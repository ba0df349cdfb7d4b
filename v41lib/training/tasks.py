"""What small models are trained on: real text as bytes, and planted look-ups whose answers lie beyond every window.

A look-up is a fact, two task symbols in a row, and later a question that only the fact answers. Task symbols are ids
that text never contains. Everything random is drawn from the generator that is passed in.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Bool, Float32, Int, Int64, UInt8
from torch import Tensor

from v41lib.resources import data_path

VOCAB = 384  # 256 byte values, then 128 task symbols
KEYS = range(256, 288)
VALUES = range(288, 320)
ENDS = range(320, 352)
ASK = 352  # "ASK k": what does the value of k lead to?

ANSWER_WEIGHT = 4.0

SUFFIXES = (".py", ".rst", ".txt")
LARGEST_FILE = 300_000  # bytes; what is larger are tables of numbers and generated code, not text

Split = Literal["train", "heldout"]
Parity = Literal["even", "odd", "both"]


@dataclass(frozen=True)
class SourceFile:
    """One file of a corpus: its name relative to where packages lie, as in ``sympy/core/add.py``, and its bytes."""

    name: str
    size: int
    sha256: str
    split: Split


@dataclass(frozen=True)
class Corpus:
    """Text as bytes: files in the order of their names, each followed by a zero byte, whole files held out."""

    train: UInt8[Tensor, " train"]
    heldout: UInt8[Tensor, " heldout"]
    files: tuple[SourceFile, ...]
    digest: str


@functools.cache
def corpus(packages: tuple[str, ...] = ("sympy", "networkx", "docutils"), folder: Path | None = None) -> Corpus:
    """The text files of installed packages, or those of the reader's own ``folder`` (there also ``.md``).

    Folders of tests, hidden folders, empty files and files over 300,000 bytes are left out. One file in twenty is
    held out, by its name. Raises ``ValueError`` for a package that is not installed, and when there is no file to
    train on or none to hold out.
    """
    if folder is not None:
        found = _text_files(folder, folder, (*SUFFIXES, ".md"))
        source = f"folder {folder}"
    else:
        found = [(name, path) for package in packages for name, path in _package_files(package)]
        source = f"packages {', '.join(packages)}"
    texts: dict[Split, bytearray] = {"train": bytearray(), "heldout": bytearray()}
    files = []
    for name, path in sorted(found):
        content = path.read_bytes()
        split: Split = "heldout" if int(_sha256(name.encode())[:8], 16) % 20 == 0 else "train"
        texts[split] += content + b"\0"
        files.append(SourceFile(name, len(content), _sha256(content), split))
    if not files:
        raise ValueError(f"{source}: no text file (.py, .rst, .txt, in a folder also .md) of 1 to {LARGEST_FILE} bytes")
    for split, text in texts.items():
        if not text:
            raise ValueError(
                f"{source}: none of the {len(files)} text files falls to the split {split}; "
                "about one file in twenty is held out, by its name, so take a folder with more files"
            )
    train, heldout = (torch.frombuffer(text, dtype=torch.uint8) for text in texts.values())
    digest = _sha256(json.dumps([(file.name, file.sha256, file.split) for file in files]).encode())
    return Corpus(train, heldout, tuple(files), digest)


def _package_files(package: str) -> list[tuple[str, Path]]:
    spec = importlib.util.find_spec(package)  # finds the package without running it
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"package {package} is not installed, and its files are text to train on: run `make setup`")
    folder = Path(spec.submodule_search_locations[0])
    return _text_files(folder, folder.parent, SUFFIXES)


def _text_files(folder: Path, root: Path, suffixes: tuple[str, ...]) -> list[tuple[str, Path]]:
    """Names, relative to ``root``, and paths of the text files below ``folder``."""
    found = []
    for path in folder.rglob("*"):
        inner = path.relative_to(folder).parts[:-1]
        skipped = any(part in ("tests", "testing") or part.startswith(".") for part in inner)
        if not skipped and path.suffix in suffixes and path.is_file() and 0 < path.stat().st_size <= LARGEST_FILE:
            found.append((path.relative_to(root).as_posix(), path))
    return found


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def manifest(corpus: Corpus) -> str:
    """The text of ``data/corpus.json``: package versions, and name, size, short hash and split of each file.

    Raises ``ValueError`` for a corpus that is not made of installed packages.
    """
    packages = {package: _version(package) for package in sorted({_package(file.name) for file in corpus.files})}
    for package, version in packages.items():
        if version is None:
            raise ValueError(f"{package} is no installed package: only a corpus of installed packages is recorded")
    lines = ",\n".join(json.dumps(_entry(file)) for file in corpus.files)
    head = f'"packages": {json.dumps(packages)},\n"digest": {json.dumps(corpus.digest)}'
    return f'{{\n{head},\n"files": [\n{lines}\n]\n}}\n'


def check(corpus: Corpus) -> None:
    """Raise ``ValueError`` that names the first file in which ``corpus`` differs from ``data/corpus.json``."""
    recorded = json.loads(data_path("corpus.json").read_text(encoding="utf-8"))
    expected = {entry[0]: entry for entry in recorded["files"]}
    present = {file.name: _entry(file) for file in corpus.files}
    for name in sorted(expected.keys() | present.keys()):
        if expected.get(name) == present.get(name):
            continue
        how = "is not recorded" if name not in expected else "is missing" if name not in present else "has changed"
        package = _package(name)
        raise ValueError(
            f"{name} {how}: data/corpus.json is of {package} {recorded['packages'].get(package, '(none)')}, "
            f"installed is {_version(package) or '(none)'}; `make setup` installs the recorded packages"
        )


def _entry(file: SourceFile) -> list[str | int]:
    return [file.name, file.size, file.sha256[:16], file.split]


def _package(name: str) -> str:
    return name.partition("/")[0]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class Batch:
    """Rows to predict: inputs are ``ids[:, :-1]``, targets ``ids[:, 1:]``, and the masks are about the targets.

    ``weight`` is each target's weight in the loss, ``answer`` marks answers of look-ups, ``hop`` the one-hop answers
    of a task whose answers take two.
    """

    ids: Int64[Tensor, "B S+1"]
    weight: Float32[Tensor, "B S"]
    answer: Bool[Tensor, "B S"]
    hop: Bool[Tensor, "B S"]


def join(batches: Sequence[Batch]) -> Batch:
    """All rows of several batches. Raises ``ValueError`` for none, and for rows of different lengths."""
    lengths = sorted({batch.weight.shape[1] for batch in batches})
    if len(lengths) != 1:
        raise ValueError(f"batches of lengths {lengths}: there must be one length to join them")
    return Batch(
        torch.cat([batch.ids for batch in batches]),
        torch.cat([batch.weight for batch in batches]),
        torch.cat([batch.answer for batch in batches]),
        torch.cat([batch.hop for batch in batches]),
    )


def stream(seed: int, purpose: Split, step: int) -> torch.Generator:
    """The generator of one step: the same after a resume, and never the same for training and held-out batches."""
    return torch.Generator().manual_seed(int(_sha256(f"{purpose}/{seed}/{step}".encode())[:15], 16))


def text_batch(data: UInt8[Tensor, " N"], rows: int, length: int, generator: torch.Generator) -> Batch:
    """Random windows of text, each target of weight 1. Raises ``ValueError`` for data shorter than a window."""
    return _plain(_random_windows(data, rows, length, generator))


def heldout_windows(data: UInt8[Tensor, " N"], length: int, count: int) -> Batch:
    """``count`` windows evenly spaced over ``data``, none overlapping. Raises ``ValueError`` for too short data."""
    needed = count * (length + 1)
    if count < 1 or length < 1 or len(data) < needed:
        raise ValueError(f"{count} windows of {length} + 1 bytes take {needed} bytes, at least one: got {len(data)}")
    last = len(data) - (length + 1)
    starts = torch.tensor([last * window // max(count - 1, 1) for window in range(count)])
    return _plain(_windows(data, starts, length))


def _random_windows(data: Tensor, rows: int, length: int, generator: torch.Generator) -> Int64[Tensor, "B S+1"]:
    if rows < 1 or length < 1 or len(data) < length + 1:
        raise ValueError(
            f"{rows} windows of {length} + 1 bytes out of {len(data)}: rows and length must be at least 1, "
            "and the data at least as long as a window"
        )
    return _windows(data, torch.randint(len(data) - length, (rows,), generator=generator), length)


def _windows(data: Tensor, starts: Int[Tensor, " B"], length: int) -> Int64[Tensor, "B S+1"]:
    return data[starts.unsqueeze(1) + torch.arange(length + 1)].long()


def _plain(ids: Int64[Tensor, "B S+1"]) -> Batch:
    nowhere = torch.zeros(ids.shape[0], ids.shape[1] - 1, dtype=torch.bool)
    return Batch(ids, torch.ones(nowhere.shape), nowhere, nowhere.clone())


def echo(rows: int, length: int, generator: torch.Generator) -> Batch:
    """Nothing but triples ``x y x`` of random task symbols: the third asks for the token before this one.

    It is no look-up and its answers are not marked; it teaches the step that every look-up of a pair begins with.
    Weight 4 on third symbols, 0 elsewhere. Raises ``ValueError`` for no rows and no length.
    """
    _check_counts("echo", rows, length)
    symbols = torch.randint(KEYS.start, ASK, (2, rows, length // 3 + 1), generator=generator)
    ids = torch.stack((symbols[0], symbols[1], symbols[0]), -1).flatten(1)[:, : length + 1]
    thirds = (torch.arange(1, length + 1) % 3 == 2).expand(rows, -1)
    nowhere = torch.zeros(rows, length, dtype=torch.bool)
    return Batch(ids, thirds * ANSWER_WEIGHT, nowhere, nowhere.clone())


def pure_recall(rows: int, length: int, generator: torch.Generator, keys: int = 8, parity: Parity = "both") -> Batch:
    """Nothing but pairs ``k v``: each row has its own ``keys`` keys, and a key seen before is a question.

    Pairs begin at places of the asked ``parity``, behind a filler byte where those are odd; at "both", half of the rows
    have one, by chance. Weight 0 but on answers. Raises ``ValueError`` for no rows, no length, more keys than there
    are, and another parity.
    """
    _check_counts("pure_recall", rows, length, keys=keys)
    _check_parity(parity)
    names = _distinct(KEYS, rows, keys, generator)
    values = torch.randint(VALUES.start, VALUES.stop, (rows, keys), generator=generator)
    drawn = torch.randint(keys, (rows, length // 2 + 1), generator=generator)
    pairs = torch.stack((names.gather(1, drawn), values.gather(1, drawn)), -1)
    uses = torch.nn.functional.one_hot(drawn, keys).cumsum(1).gather(2, drawn.unsqueeze(2))  # of this key so far
    answers = torch.cat((torch.zeros_like(uses), uses > 1), -1).bool()
    filler = _fillers(rows, generator, parity)
    ids = _shifted(pairs.flatten(1), filler, filler)[:, : length + 1]
    answer = _shifted(answers.flatten(1), torch.zeros_like(filler), filler)[:, 1 : length + 1]
    return Batch(ids, answer * ANSWER_WEIGHT, answer, torch.zeros_like(answer))


def _check_parity(parity: Parity) -> None:
    if parity not in ("even", "odd", "both"):
        raise ValueError(f"parity = {parity!r}: must be even, odd or both")


def _fillers(rows: int, generator: torch.Generator, parity: Parity = "both") -> Int64[Tensor, " B"]:
    """The byte that comes before a row, or -1 for none, as what follows is to begin at even or odd places."""
    present = torch.randint(2, (rows,), generator=generator).bool()
    if parity != "both":
        present = torch.full_like(present, parity == "odd")
    return torch.where(present, torch.randint(256, (rows,), generator=generator), -1)


def _shifted(rows: Tensor, first: Int64[Tensor, " B"], filler: Int64[Tensor, " B"]) -> Tensor:
    """``rows [B,N]``, each after its ``first`` where there is a filler."""
    longer = torch.cat((first.unsqueeze(1).to(rows.dtype), rows), 1)
    starts = (filler < 0).long().unsqueeze(1)
    return longer.gather(1, starts + torch.arange(rows.shape[1]))


def recall(
    data: UInt8[Tensor, " N"],
    rows: int,
    length: int,
    generator: torch.Generator,
    pairs: int = 8,
    parity: Parity = "both",
    distance: int | None = None,
) -> Batch:
    """Text with ``pairs`` pairs ``k v`` planted in its first part, each asked once, as ``k v``, in its last.

    Keys are planted at places of the asked ``parity``; a question's key comes at least ``distance`` tokens (default:
    half the length) after the pair's value, at either parity. Text keeps weight 1; planted symbols weigh 0, answers
    4. Raises ``ValueError`` where this cannot be: too many pairs, too short a length, too large a distance.
    """
    _check_counts("recall", rows, length, pairs=pairs)
    _check_parity(parity)
    facts, questions = _regions("recall", length, distance, _Region(pairs, 2, parity=parity), _Region(pairs, 2))
    ids = _random_windows(data, rows, length, generator)
    names = _distinct(KEYS, rows, pairs, generator)
    values = torch.randint(VALUES.start, VALUES.stop, (rows, pairs), generator=generator)
    planted = facts.places(rows, generator)
    asked = _shuffled(questions.places(rows, generator), generator)
    _plant(ids, planted, names, values)
    _plant(ids, asked, names, values)
    return _planted(ids, asked + 1)


def pure_two_hop(rows: int, length: int, generator: torch.Generator, chains: int = 4) -> Batch:
    """Chains ``k -> v -> w``: every fact ``k v`` and ``v w`` once, then facts again and each question ``ASK k w`` once.

    ``answer`` marks the two-hop answers, ``hop`` the second symbols of facts told again; both weigh 4, all else 0. No
    question is asked twice: the second time it could be answered from the first, in one hop. A filler byte begins half
    of the rows, by chance; what does not fit into the row is cut off. Raises ``ValueError`` for no rows, more chains
    than there are symbols, and a length that does not hold the facts and one question.
    """
    _check_counts("pure_two_hop", rows, length, chains=chains)
    if length < 4 * chains + 3:
        raise ValueError(
            f"pure_two_hop: length = {length} must be at least {4 * chains + 3}, for a filler, "
            f"the {2 * chains} facts and a question"
        )
    names, values, ends = (_distinct(symbols, rows, chains, generator) for symbols in (KEYS, VALUES, ENDS))
    none = torch.full_like(names, -1)
    items = torch.cat(  # [B, 3 * chains, 3]: facts k v, facts v w, questions
        [
            torch.stack(symbols, -1)
            for symbols in ((names, values, none), (values, ends, none), (torch.full_like(names, ASK), names, ends))
        ],
        1,
    )
    told = _shuffled(torch.arange(2 * chains).expand(rows, -1), generator)
    again = max(length + 1 - 7 * chains, 0) // 2 + 1  # facts told again, to fill the row
    repeated = torch.randint(2 * chains, (rows, again), generator=generator)
    questions = torch.arange(2 * chains, 3 * chains).expand(rows, -1)
    order = torch.cat((told, _shuffled(torch.cat((repeated, questions), 1), generator)), 1)
    tokens = items.gather(1, order.unsqueeze(2).expand(-1, -1, 3))
    asks = order >= 2 * chains
    marks = torch.zeros_like(tokens)
    marks[..., 2] = asks
    marks[:, 2 * chains :, 1] = 2 * ~asks[:, 2 * chains :]
    kept = tokens.flatten(1) >= 0
    pieces = [
        (row[keep][: length + 1], mark[keep][: length + 1])
        for row, mark, keep in zip(tokens.flatten(1), marks.flatten(1), kept, strict=True)
    ]
    filler = _fillers(rows, generator)
    ids = _shifted(torch.stack([row for row, _ in pieces]), filler, filler)
    mark = _shifted(torch.stack([mark for _, mark in pieces]), torch.zeros_like(filler), filler)[:, 1:]
    return Batch(ids, (mark > 0) * ANSWER_WEIGHT, mark == 1, mark == 2)


def two_hop(
    data: UInt8[Tensor, " N"],
    rows: int,
    length: int,
    generator: torch.Generator,
    chains: int = 4,
    distance: int | None = None,
) -> Batch:
    """Text with facts ``k v`` and ``v w`` planted in its first part, and questions ``ASK k w`` in its last.

    No two facts touch, and between the two of one chain lie facts of all the others. A question comes at least
    ``distance`` tokens (default: half the length) after both of its facts. Weights as for :func:`recall`, and the same
    ``ValueError``.
    """
    _check_counts("two_hop", rows, length, chains=chains)
    facts, questions = _regions("two_hop", length, distance, _Region(2 * chains, 2, gap=1), _Region(chains, 3))
    ids = _random_windows(data, rows, length, generator)
    names, values, ends = (_distinct(symbols, rows, chains, generator) for symbols in (KEYS, VALUES, ENDS))
    # One chain's facts are planted at the i-th place of each half: side by side, both would fit into one window.
    halves = facts.places(rows, generator).unflatten(1, (2, chains))
    swapped = torch.randint(2, (rows, chains), generator=generator).bool()
    _plant(ids, torch.where(swapped, halves[:, 1], halves[:, 0]), names, values)
    _plant(ids, torch.where(swapped, halves[:, 0], halves[:, 1]), values, ends)
    asked = _shuffled(questions.places(rows, generator), generator)
    _plant(ids, asked, torch.full_like(names, ASK), names, ends)
    return _planted(ids, asked + 2)


def _check_counts(task: str, rows: int, length: int, **symbols: int) -> None:
    for name, number in {"rows": rows, "length": length, **symbols}.items():
        if number < 1:
            raise ValueError(f"{task}: {name} = {number} must be at least 1")
    for name, number in symbols.items():
        if number > len(KEYS):
            raise ValueError(f"{task}: {name} = {number} must be at most {len(KEYS)}, the number of different keys")


def _distinct(symbols: range, rows: int, count: int, generator: torch.Generator) -> Int64[Tensor, "B C"]:
    """Different ``symbols`` in each row, in random order."""
    return symbols.start + _shuffled(torch.arange(len(symbols)).expand(rows, -1), generator)[:, :count]


def _shuffled(rows: Tensor, generator: torch.Generator) -> Tensor:
    """``rows [B,N]``, each in a random order of its own."""
    return rows.gather(1, torch.rand(rows.shape, generator=generator).argsort(1))


@dataclass(frozen=True)
class _Region:
    """Where ``count`` plants of ``width`` tokens go: ``gap`` or more apart, in ``size`` places from ``start`` on."""

    count: int
    width: int
    gap: int = 0
    parity: Parity = "both"
    start: int = 0
    size: int = 0

    @property
    def needed(self) -> int:
        """The smallest ``size`` that holds the plants."""
        if self.parity != "both":
            return self.count * self.width + (self.parity == "odd")
        tight = self.count * self.width + (self.count - 1) * self.gap
        return tight + (tight - self.width + 1) % 2  # see places()

    def places(self, rows: int, generator: torch.Generator) -> Int64[Tensor, "B C"]:
        """Where the plants begin, ascending, every arrangement equally likely."""
        if self.parity != "both":  # width 2, no gap: slots of two places
            offset = int(self.parity == "odd")
            return self.start + offset + 2 * _increasing((self.size - offset) // 2, rows, self.count, generator)
        # The last place to begin at must be odd: then the mirror image of an arrangement, as likely as itself, begins
        # at odd places where this begins at even ones, and both are equally frequent.
        last = self.size - self.width
        last -= (last + 1) % 2
        step = self.width + self.gap - 1
        shrunk = _increasing(last + 1 - (self.count - 1) * step, rows, self.count, generator)  # plants of one token
        return self.start + shrunk + step * torch.arange(self.count)


def _increasing(stop: int, rows: int, count: int, generator: torch.Generator) -> Int64[Tensor, "B C"]:
    return _distinct(range(stop), rows, count, generator).sort(1).values


def _regions(
    task: str, length: int, distance: int | None, facts: _Region, questions: _Region
) -> tuple[_Region, _Region]:
    """The two regions with what room there is divided, ``distance`` between the last fact's end and any question."""
    distance = length // 2 if distance is None else distance
    if distance < 1:
        raise ValueError(f"{task}: distance = {distance} must be at least 1 token")
    room = length + 2 - distance  # of length + 1 places, distance - 1 lie between the regions
    spare = room - facts.needed - questions.needed
    if spare < 0:
        raise ValueError(
            f"{task}: {facts.count} facts take {facts.needed} tokens and {questions.count} questions "
            f"{questions.needed}, but length = {length} with distance = {distance} leaves {max(room, 0)} for both: "
            f"with this distance the length must be at least {length - spare}"
        )
    cut = facts.needed + spare // 2
    return replace(facts, size=cut), replace(questions, start=cut - 1 + distance, size=room - cut)


def _plant(ids: Int64[Tensor, "B S+1"], places: Int64[Tensor, "B C"], *symbols: Int64[Tensor, "B C"]) -> None:
    """Overwrite text in place: the first symbols at ``places``, the others after them."""
    for offset, symbol in enumerate(symbols):
        ids.scatter_(1, places + offset, symbol)


def _planted(ids: Int64[Tensor, "B S+1"], answers: Int64[Tensor, "B C"]) -> Batch:
    """Weights of text with plants: text 1, task symbols 0, but those at the places of ``answers`` 4."""
    answer = torch.zeros(ids.shape, dtype=torch.bool).scatter_(1, answers, True)[:, 1:]
    weight = (ids[:, 1:] < 256).float().masked_fill(answer, ANSWER_WEIGHT)
    return Batch(ids, weight, answer, torch.zeros_like(answer))
