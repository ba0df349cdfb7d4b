"""The locks hold everything that the short lists ask for, exactly, and for the oldest Python that is promised."""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools import bootstrap, lock

NAMES = ("requirements.in", "requirements-parity.in", "requirements.txt", "requirements-parity.txt")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in NAMES:
        shutil.copy(lock.ROOT / name, tmp_path)
    return tmp_path


def test_the_locks_satisfy_their_short_lists() -> None:
    assert lock.problems() == []


def test_the_locks_name_no_place_and_no_local_version() -> None:
    for name in NAMES:
        for line in (lock.ROOT / name).read_text().splitlines():
            assert not re.search(r"://|^-|\+|@|--hash", line.split("#")[0]), f"{name}: {line}"


def test_the_library_asks_for_what_is_locked() -> None:
    project = tomllib.loads((lock.ROOT / "pyproject.toml").read_text())["project"]
    pins = {canonicalize_name(r.name): r.specifier for r in lock.read_requirements(lock.ROOT / "requirements.txt")}
    for line in project["dependencies"] + project["optional-dependencies"]["run"]:
        wanted = Requirement(line)
        version = str(pins[canonicalize_name(wanted.name)]).removeprefix("==")
        assert wanted.specifier.contains(version), line
    assert project["requires-python"] == ">={}.{}".format(*bootstrap.OLDEST)


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("requirements.in", "numpy\n", "numpy\nno-such-package\n", "needs no-such-package, which is not locked"),
        ("requirements.in", "torch==2.13.0", "torch==2.99", "needs torch==2.99, the lock has 2.13.0"),
        ("requirements.txt", r"traitlets==.*\n", "", "traitlets.*which is not locked"),
        ("requirements.txt", r"(?m)^click==.*$", "click>=8", "is not one exact public version"),
        ("requirements.txt", r"torch==2.13.0", "torch==2.13.0+cpu", "is not one exact public version"),
        ("requirements-parity.txt", r"(?m)^mlx-lm==.*$", "mlx-lm==0.1", "the lock has 0.1"),
    ],
)
def test_a_lock_that_fails_its_list_is_named(root: Path, file: str, old: str, new: str, said: str) -> None:
    text = (root / file).read_text()
    changed = re.sub(old, new, text)
    assert changed != text
    (root / file).write_text(changed)
    assert any(re.search(said, problem) for problem in lock.problems(root)), lock.problems(root)


def test_a_release_too_new_for_the_oldest_python_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "OLDEST_PYTHON", "3.8.0")
    assert any("needs Python" in problem for problem in lock.problems())
