"""Makes `.venv` with everything the book needs, or says exactly what is missing. Standard library only.

    python3.11 tools/bootstrap.py          what `make book` needs
    python3.11 tools/bootstrap.py --tests  the packages for live parity too, what `make test` needs

It may be stopped at any time and started again: what is there is kept, what is half made is repaired. A stamp says that
everything is in place; it is removed before the first change and written after the last.

TORCH_INDEX=<address> takes torch, and only torch, from another package index: the way to choose a CPU or CUDA build.
The choice is kept for later calls; remove `.venv` to go back to the default index.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST = (3, 11)
GIB = 2**30
# About 2 GiB of packages with a CPU torch, 7 GiB with a CUDA one; the rest is room for downloads and results.
NEED_CPU, NEED_CUDA = 3.0, 10.0
# Where another pip setting would send the packages somewhere else than into `.venv`.
UNWANTED = ("PIP_TARGET", "PIP_PREFIX", "PIP_USER", "PIP_REQUIRE_HASHES", "PYTHONPATH", "PYTHONHOME")
# What pip says, and what a person can do about it.
ADVICE = {
    "No space left on device": "the disk is full: free some space (pip's own cache counts: `pip cache purge`)",
    "No matching distribution found|Could not find a version": (
        "the package index has no such version for this Python and machine; is it reachable, is TORCH_INDEX right?"
    ),
    "NewConnectionError|NameResolution|Network is unreachable|ReadTimeout|ProxyError|SSLError": (
        "the package index could not be reached: look at the network, a proxy or a firewall"
    ),
    "externally-managed-environment": "`.venv` is not a virtual environment: remove it",
}


class CannotSetUp(Exception):
    """Something is missing that only a person can provide; the message says what."""


# --- what must be there before anything is made ---------------------------------------------------------------------


def check_python(version: tuple[int, ...] = sys.version_info[:3], executable: str = sys.executable) -> None:
    """Refuses a Python that is too old."""
    if version[:2] < OLDEST:
        shown = ".".join(map(str, version))
        raise CannotSetUp(
            f"{executable} is Python {shown}; the book needs 3.11 or newer.\n"
            "Install one and name it:  make book PYTHON=python3.11"
        )


def check_modules(version: tuple[int, ...] = sys.version_info[:3]) -> None:
    """Refuses a Python without the parts that Debian packages apart, or that some builds leave out."""
    short = ".".join(map(str, version[:2]))
    if any(importlib.util.find_spec(name) is None for name in ("venv", "ensurepip")):
        raise CannotSetUp(
            f"this Python {short} has no `venv` or no `ensurepip` module, which make the virtual environment.\n"
            f"Debian, Ubuntu: apt install python{short}-venv (as root). Elsewhere: reinstall Python with them."
        )
    compiled = ("_ssl", "_ctypes", "_sqlite3", "zlib")
    missing = [name.lstrip("_") for name in compiled if importlib.util.find_spec(name) is None]
    if missing:
        raise CannotSetUp(
            f"{sys.executable} was built without {', '.join(missing)}.\n"
            "Take a complete one (Debian: apt install python3) and name it:  make book PYTHON=/usr/bin/python3"
        )


def check_path(root: Path) -> None:
    """Refuses a checkout where no virtual environment can be."""
    if os.pathsep in str(root):
        raise CannotSetUp(
            f"the path of this checkout has a '{os.pathsep}' in it, and no virtual environment can be made there:\n"
            f"  {root}\nMove the checkout."
        )
    if not os.access(root, os.W_OK):
        raise CannotSetUp(f"{root} cannot be written to: make it writable, or clone where you may write.")


def check_disk(root: Path, torch_index: str, free: float | None = None) -> None:
    """Refuses to start a download that will not fit. ``free`` in GiB is measured unless given."""
    if os.environ.get("DISK_CHECK") == "0":
        return
    if free is None:
        free = shutil.disk_usage(root).free / GIB
    there = size_of(root / ".venv") / GIB
    may_be_cuda = sys.platform == "linux" and not torch_index.rstrip("/").endswith("cpu")
    has_torch = any((root / ".venv").glob("lib/python*/site-packages/torch-*.dist-info"))
    if free + there < NEED_CPU:
        raise CannotSetUp(
            f"too little disk: {NEED_CPU:.0f} GiB needed for the packages, {there:.1f} GiB of them there, "
            f"{free:.1f} GiB free at\n  {root}\nFree some space or move the checkout."
        )
    if may_be_cuda and not has_torch and free + there < NEED_CUDA:
        raise CannotSetUp(
            f"perhaps too little disk: {free:.1f} GiB free. {NEED_CPU:.0f} GiB do for a CPU build of torch, but\n"
            f"on Linux the default index usually has the CUDA build, which needs {NEED_CUDA:.0f} GiB. Choose:\n"
            "  make book TORCH_INDEX=<the CPU index address that pytorch.org's install page prints>\n"
            "  make book DISK_CHECK=0    if your index has a CPU build"
        )


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder; 0 if there is none."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


# --- the stamp ------------------------------------------------------------------------------------------------------


def wanted_stamp(root: Path, tests: bool, torch_index: str) -> str:
    """What a finished set-up depends on, as one hash. The place counts: an editable install names it."""
    digest = hashlib.sha256(f"{root}\n{torch_index}\n".encode())
    for name in ("pyproject.toml", "requirements.txt") + (("requirements-parity.txt",) if tests else ()):
        digest.update((root / name).read_bytes())
    return digest.hexdigest()


def stamp_file(root: Path, tests: bool) -> Path:
    return root / ".venv" / ("ready-test" if tests else "ready-book")


def is_ready(root: Path, tests: bool, torch_index: str) -> bool:
    """True if nothing needs doing. The interpreter is looked at too: `.venv` dies with the Python it was made from."""
    stamp = stamp_file(root, tests)
    return (
        os.access(venv_python(root), os.X_OK)
        and stamp.is_file()
        and stamp.read_text() == wanted_stamp(root, tests, torch_index)
    )


def chosen_torch_index(root: Path) -> str:
    """TORCH_INDEX, or else the one that `.venv` was made with; "" is pip's default index."""
    kept = root / ".venv" / "torch-index"
    return os.environ.get("TORCH_INDEX", "").strip() or (kept.read_text() if kept.is_file() else "")


def venv_python(root: Path) -> Path:
    return root / ".venv" / "bin" / "python"


# --- the steps ------------------------------------------------------------------------------------------------------


def say(text: str) -> None:
    print(text, flush=True)


def make_venv(root: Path, torch_index: str) -> None:
    """A working `.venv` with pip: kept if it is one, made anew if it is half made or has another torch."""
    venv, chosen = root / ".venv", root / ".venv" / "torch-index"
    if venv.exists():
        same_torch = chosen.is_file() and chosen.read_text() == torch_index
        works = venv_works(root)
        if works and same_torch:
            for name in drop_half_installed(venv):
                say(f"      {name} was half installed: it will be installed again")
            return
        say("      .venv is " + ("for another TORCH_INDEX" if works else "half made") + ": made anew")
        shutil.rmtree(venv)
    command = [sys.executable, "-m", "venv", str(venv)]
    made = subprocess.run(command, capture_output=True, text=True, env=clean_env(root))
    if made.returncode != 0:
        raise CannotSetUp(f"`{sys.executable} -m venv .venv` failed:\n{made.stdout}{made.stderr}".rstrip())
    chosen.write_text(torch_index)


def venv_works(root: Path) -> bool:
    """True if `.venv` has a Python that starts, is new enough and has pip."""
    command = [str(venv_python(root)), "-c", "import pip, sys; sys.exit(sys.version_info < (3, 11))"]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:  # no such file, or a link to a Python that is gone
        return False


def drop_half_installed(venv: Path) -> list[str]:
    """Removes the marks of packages whose unpacking was cut short, so that pip unpacks them again; returns their names.

    pip writes RECORD last, and its own INSTALLER file is listed there: a RECORD without it is the archive's.
    """
    dropped = []
    for site in venv.glob("lib/python*/site-packages"):
        for left_over in site.glob("~*"):  # what an interrupted upgrade moved out of the way
            shutil.rmtree(left_over, ignore_errors=True)
        for info in site.glob("*.dist-info"):
            record = info / "RECORD"
            if not record.is_file() or "/INSTALLER," not in record.read_text(encoding="utf-8"):
                shutil.rmtree(info)
                dropped.append(info.name.split("-")[0])
    return dropped


def clean_env(root: Path) -> dict[str, str]:
    """The environment for pip: quiet, and with scratch space on the disk that was measured."""
    env = {name: value for name, value in os.environ.items() if name not in UNWANTED}
    scratch = root / "build" / "tmp"
    scratch.mkdir(parents=True, exist_ok=True)
    return env | {
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_INPUT": "1",
        "PIP_ROOT_USER_ACTION": "ignore",
        "PYTHONNOUSERSITE": "1",
        "TMPDIR": str(scratch),
    }


@contextmanager
def start(command: list[str], root: Path) -> Iterator[subprocess.Popen[str]]:
    """A running command whose output can be read; ended with us if we are interrupted."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        env=clean_env(root),
        cwd=root,
    )
    try:
        yield process
        process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


def pip_install(root: Path, step: str, *arguments: str) -> None:
    """`pip install` with a few lines of progress; everything it says goes to build/setup.log."""
    command = [str(venv_python(root)), "-m", "pip", "install", "--progress-bar", "off", *arguments]
    log = root / "build" / "setup.log"
    said: list[str] = []
    found = 0
    with log.open("a", encoding="utf-8") as out, start(command, root) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            out.write(line)
            if "WARNING: Location" not in line:  # a mirror on disk that lacks a package: noise
                said.append(line.rstrip())
            if line.startswith("Collecting "):
                found += 1
                if found % 25 == 0:
                    say(f"      {found} packages found, at {line.split()[1]}")
            elif size := re.search(r"Downloading (\S+) \((\d{2,}(?:\.\d)?) MB\)", line):
                say(f"      downloading {size[1].rsplit('/', 1)[-1]} ({size[2]} MB)")
            elif line.startswith("Installing collected packages"):
                say(f"      unpacking {line.count(',') + 1} packages")
    if pip.returncode != 0:
        text = "\n".join(said)
        advice = next((hint for pattern, hint in ADVICE.items() if re.search(pattern, text)), "see the lines above")
        tail = "\n".join(f"  {line}" for line in said[-12:])
        raise CannotSetUp(
            f"pip failed at the step '{step}':\n{tail}\n{advice}.\n"
            "The full text is in build/setup.log. The same command goes on from here."
        )


def set_up(root: Path, tests: bool, torch_index: str) -> None:
    """All steps in order, the stamp last."""
    for either in (True, False):
        stamp_file(root, either).unlink(missing_ok=True)
    (root / "build").mkdir(exist_ok=True)
    (root / "build" / "setup.log").write_text("")
    steps = 3 + bool(torch_index) + tests
    number = iter(range(1, steps + 1))

    def announce(what: str) -> str:
        say(f"[{next(number)}/{steps}] {what}")
        return what

    announce(f"virtual environment .venv, from {sys.executable}")
    make_venv(root, torch_index)
    if torch_index:
        pinned = re.search(r"^torch==\S+$", (root / "requirements.txt").read_text(), re.MULTILINE)
        if pinned is None:
            raise CannotSetUp("requirements.txt has no line `torch==...`: restore it from the repository")
        step = announce(f"{pinned[0]} from TORCH_INDEX")
        pip_install(root, step, "--index-url", torch_index, "--no-deps", pinned[0])
    step = announce("locked packages, requirements.txt (a few minutes the first time)")
    pip_install(root, step, "-r", "requirements.txt")
    if tests:
        step = announce("packages for live parity, requirements-parity.txt")
        pip_install(root, step, "-r", "requirements-parity.txt", "-c", "requirements.txt")
    step = announce("v41lib itself, editable")
    pip_install(root, step, "--no-build-isolation", "--no-deps", "--editable", ".")
    for either in {tests, False}:  # a set-up for the tests serves the book as well
        stamp_file(root, either).write_text(wanted_stamp(root, either, torch_index))
    shutil.rmtree(root / "build" / "tmp", ignore_errors=True)


@contextmanager
def alone(root: Path) -> Iterator[None]:
    """Two set-ups in one checkout would trip over each other: the second waits."""
    (root / "build").mkdir(exist_ok=True)
    with (root / "build" / "setup.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another set-up of this checkout is running: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main(root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tests", action="store_true", help="install the packages for live parity too")
    tests = parser.parse_args().tests
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that pip is ended with us, and nothing runs on
    try:
        torch_index = chosen_torch_index(root)
        if is_ready(root, tests, torch_index):
            return 0
        check_python()
        check_modules()
        check_path(root)
        with alone(root):
            if not is_ready(root, tests, torch_index):  # it may have become so while we waited
                check_disk(root, torch_index)
                set_up(root, tests, torch_index)
                say("set-up done")
    except CannotSetUp as problem:
        print(f"\nset-up stopped: {problem}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nset-up interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
