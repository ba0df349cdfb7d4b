"""Makes requirements.txt and requirements-parity.txt from their short lists, and checks them offline.

python tools/lock.py            lock again, keeping every pin that is there (`make lock`)
python tools/lock.py --upgrade  lock again with the newest versions (`make lock UPGRADE=1`)
python tools/lock.py --check    say what the lock lacks, from the installed packages' metadata; no network
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
# The oldest interpreter the book promises to run on: Debian 12's. Some releases refuse it though they accept 3.11.7.
OLDEST_PYTHON = "3.11.2"
# What only a CUDA build of torch asks for. torch pins these itself, and a CPU build must not install them.
CUDA_ONLY = ("nvidia-", "cuda-", "triton")
# Packages that exist for one system only. The lock is made on Linux and must still install elsewhere.
MARKERS = {"mlx-cpu": 'sys_platform == "linux"'}


def read_requirements(path: Path) -> list[Requirement]:
    """The requirements of a file, comments and blank lines left out."""
    lines = (line.split("#")[0].strip() for line in path.read_text().splitlines())
    return [Requirement(line) for line in lines if line]


def resolve(source: Path, constraint: Path | None) -> dict[str, str]:
    """What pip would install for ``source`` on the oldest Python: name -> public version."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "report.json")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        command += ["--python-version", OLDEST_PYTHON, "--only-binary", ":all:", "--target", scratch]
        command += ["--report", str(report), "--requirement", str(source)]
        if constraint is not None:
            command += ["--constraint", str(constraint)]
        if subprocess.run(command).returncode != 0:
            sys.exit(f"{source.name} does not resolve; if a kept pin stands in the way: make lock UPGRADE=1")
        packages = [entry["metadata"] for entry in json.loads(report.read_text())["install"]]
    return {
        canonicalize_name(package["name"]): package["version"].split("+")[0]  # a local version is on no public index
        for package in packages
        if not canonicalize_name(package["name"]).startswith(CUDA_ONLY)
    }


def write_lock(path: Path, source: Path, pins: dict[str, str]) -> None:
    """One sorted ``name==version`` a line, below a line that says where it comes from."""
    lines = [f"# Locked from {source.name} for Python {OLDEST_PYTHON} and newer by `make lock`. Do not edit."]
    for name, version in sorted(pins.items()):
        lines.append(f"{name}=={version}" + (f"; {MARKERS[name]}" if name in MARKERS else ""))
    path.write_text("\n".join(lines) + "\n")
    print(f"{path.name}: {len(pins)} packages")


def make(upgrade: bool) -> None:
    """Locks both lists; the parity list on top of the main one."""
    main, parity = ROOT / "requirements.txt", ROOT / "requirements-parity.txt"
    main_pins = resolve(ROOT / "requirements.in", main if main.exists() and not upgrade else None)
    write_lock(main, ROOT / "requirements.in", main_pins)
    with tempfile.TemporaryDirectory() as scratch:
        kept = Path(scratch, "constraints.txt")
        kept.write_text(main.read_text() + (parity.read_text() if parity.exists() and not upgrade else ""))
        pins = resolve(ROOT / "requirements-parity.in", kept)
    write_lock(parity, ROOT / "requirements-parity.in", {k: v for k, v in pins.items() if k not in main_pins})


def problems(root: Path = ROOT) -> list[str]:
    """Every way in which the lock fails its short lists, one line each."""
    found = []
    pins: dict[str, str] = {}
    for name in ("requirements.txt", "requirements-parity.txt"):
        for requirement in read_requirements(root / name):
            exact = [spec for spec in requirement.specifier if spec.operator == "=="]
            if len(exact) != 1 or "+" in exact[0].version or "*" in exact[0].version or requirement.url:
                found.append(f"{name}: {requirement} is not one exact public version")
            else:
                pins[canonicalize_name(requirement.name)] = exact[0].version

    lists = ("requirements.in", "requirements-parity.in")
    waiting = [(name, requirement) for name in lists for requirement in read_requirements(root / name)]
    seen: set[tuple[str, str]] = set()  # packages with an extra of theirs
    while waiting:  # everything reachable from the short lists must be pinned, at a version that its user accepts
        user, requirement = waiting.pop()
        if requirement.marker and not requirement.marker.evaluate({**default_environment(), "extra": ""}):
            continue
        name = canonicalize_name(requirement.name)
        if name.startswith(CUDA_ONLY):
            continue
        if name not in pins:
            found.append(f"{user} needs {requirement}, which is not locked")
            continue
        if not requirement.specifier.contains(pins[name], prereleases=True):
            found.append(f"{user} needs {requirement}, the lock has {pins[name]}")
        found += _follow(name, requirement.extras, seen, waiting)
    return sorted(set(found))


def _follow(
    name: str, extras: set[str], seen: set[tuple[str, str]], waiting: list[tuple[str, Requirement]]
) -> list[str]:
    """Queues what an installed package needs, once for each extra; says if it is too new for the oldest Python."""
    found = []
    try:
        package = distribution(name)
    except PackageNotFoundError:
        return []  # nothing to read: the parity packages are not installed by `make book`
    asked = package.metadata["Requires-Python"]
    if asked and not SpecifierSet(asked).contains(OLDEST_PYTHON):
        found.append(f"{name} {package.version} needs Python {asked}, the book promises {OLDEST_PYTHON}")
    for extra in ("", *extras):
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        for line in package.requires or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({**default_environment(), "extra": extra}):
                requirement.marker = None
                waiting.append((f"{name} {package.version}", requirement))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions instead of keeping the pins")
    parser.add_argument("--check", action="store_true", help="only check, from what is installed")
    arguments = parser.parse_args()
    if not arguments.check:
        make(arguments.upgrade)
    elif found := problems():
        sys.exit("\n".join([*found, "the lock does not satisfy its short lists: make lock"]))


if __name__ == "__main__":
    main()
