"""The set-up names what is missing, and can be stopped anywhere and repeated."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools import bootstrap

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "a checkout"
    root.mkdir()
    for name in ("pyproject.toml", "requirements.txt", "requirements-parity.txt"):
        (root / name).write_text(f"# {name}\ntorch==2.13.0\n")
    return root


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A set-up that installs nothing: what pip would have been called with."""
    called: list[str] = []
    monkeypatch.setattr(bootstrap, "pip_install", lambda root, step, *arguments: called.append(" ".join(arguments)))
    return called


@pytest.fixture
def venv(checkout: Path) -> Path:
    """A virtual environment that could have come from an earlier set-up, with a stand-in for pip."""
    folder = checkout / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site_packages(folder) / "pip.py").write_text("")
    (folder / "torch-index").write_text("")
    return folder


def site_packages(venv: Path) -> Path:
    return next(venv.glob("lib/python*/site-packages"))


def find_python(path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/sh", str(ROOT / "tools" / "find_python.sh")],
        env={"PATH": str(path), **environment},
        capture_output=True,
        text=True,
    )


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


# --- what must be there ---


def test_no_python_that_is_new_enough(tmp_path: Path) -> None:
    script(tmp_path / "python3", "exit 1")  # what an old one answers
    (tmp_path / "head").symlink_to("/usr/bin/head")
    found = find_python(tmp_path)
    assert found.returncode == 1 and "No Python 3.11 or newer found" in found.stderr and "apt install" in found.stderr
    old = find_python(
        tmp_path, PYTHON=str(script(tmp_path / "old", 'case "$1" in -c) exit 1;; esac; echo Python 3.9.2'))
    )
    assert old.returncode == 1 and "it says: Python 3.9.2" in old.stderr


def test_the_first_python_that_is_new_enough_is_taken(tmp_path: Path) -> None:
    script(tmp_path / "python3.11", "exit 127")  # a launcher without that version behind it
    script(tmp_path / "python3.12", f'exec "{sys.executable}" "$@"')
    assert find_python(tmp_path).stdout == "python3.12\n"
    assert find_python(tmp_path, PYTHON=sys.executable).stdout == f"{sys.executable}\n"


def test_too_old_a_python_is_named() -> None:
    bootstrap.check_python((3, 11, 2))
    with pytest.raises(bootstrap.CannotSetUp, match=r"is Python 3\.10\.13; .* 3\.11 or newer"):
        bootstrap.check_python((3, 10, 13))


@pytest.mark.parametrize("missing", ["ensurepip", "venv"])
def test_a_missing_module_names_the_package_of_this_version(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    bootstrap.check_modules()
    hide(monkeypatch, missing)
    with pytest.raises(bootstrap.CannotSetUp, match=r"apt install python3\.12-venv"):
        bootstrap.check_modules((3, 12, 1))


def test_a_python_without_ssl_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "_ssl")
    with pytest.raises(bootstrap.CannotSetUp, match="built without ssl"):
        bootstrap.check_modules()


def hide(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    find = bootstrap.importlib.util.find_spec
    monkeypatch.setattr(bootstrap.importlib.util, "find_spec", lambda name: None if name == missing else find(name))


def test_too_little_disk_says_what_is_needed_and_what_is_there(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("DISK_CHECK", raising=False)
    bootstrap.check_disk(checkout, "", free=50.0)
    bootstrap.check_disk(checkout, "https://example.org/whl/cpu", free=4.0)
    with pytest.raises(bootstrap.CannotSetUp, match=r"3 GiB needed .*, 0\.0 GiB of them there, 1\.5 GiB free"):
        bootstrap.check_disk(checkout, "https://example.org/whl/cpu", free=1.5)
    with pytest.raises(
        bootstrap.CannotSetUp, match=r"CUDA build, which needs 10 GiB(.|\n)*TORCH_INDEX(.|\n)*DISK_CHECK=0"
    ):
        bootstrap.check_disk(checkout, "", free=4.0)
    monkeypatch.setenv("DISK_CHECK", "0")
    bootstrap.check_disk(checkout, "", free=0.1)


def test_what_is_installed_already_needs_no_room(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "size_of", lambda folder: 2 * bootstrap.GIB)
    (checkout / ".venv/lib/python3.11/site-packages/torch-2.13.0.dist-info").mkdir(parents=True)
    bootstrap.check_disk(checkout, "", free=1.5)


def test_a_place_where_no_venv_can_be_is_refused(tmp_path: Path) -> None:
    bad = tmp_path / "a:b"
    bad.mkdir()
    with pytest.raises(bootstrap.CannotSetUp, match="Move the checkout"):
        bootstrap.check_path(bad)


# --- steps and stamp ---


def test_a_set_up_is_done_once(checkout: Path, venv: Path, steps: list[str]) -> None:
    assert not bootstrap.is_ready(checkout, False, "")
    bootstrap.set_up(checkout, False, "")
    assert steps == ["-r requirements.txt", "--no-build-isolation --no-deps --editable ."]
    assert bootstrap.is_ready(checkout, False, "") and not bootstrap.is_ready(checkout, True, "")
    bootstrap.set_up(checkout, True, "")
    assert "-r requirements-parity.txt -c requirements.txt" in steps
    assert bootstrap.is_ready(checkout, False, "") and bootstrap.is_ready(checkout, True, "")


@pytest.mark.parametrize("changed", ["requirements.txt", "requirements-parity.txt", "pyproject.toml"])
def test_a_changed_lock_installs_again(checkout: Path, venv: Path, steps: list[str], changed: str) -> None:
    bootstrap.set_up(checkout, True, "")
    (checkout / changed).write_text("# other\ntorch==2.13.0\n")
    assert not bootstrap.is_ready(checkout, True, "")
    assert bootstrap.is_ready(checkout, False, "") == (changed == "requirements-parity.txt")


@pytest.mark.parametrize("stop_at", ["-r requirements.txt", "-r requirements-parity.txt -c requirements.txt"])
def test_a_set_up_stopped_anywhere_is_not_ready_and_goes_on(
    checkout: Path, venv: Path, monkeypatch: pytest.MonkeyPatch, stop_at: str
) -> None:
    called = []

    def stopped(root: Path, step: str, *arguments: str) -> None:
        called.append(" ".join(arguments))
        if called[-1] == stop_at:
            raise KeyboardInterrupt

    monkeypatch.setattr(bootstrap, "pip_install", lambda *_: None)
    bootstrap.set_up(checkout, True, "")  # one that was ready before does not count either
    (checkout / "requirements.txt").write_text("torch==2.13.0\nnew==1\n")
    with monkeypatch.context() as patch:
        patch.setattr(bootstrap, "pip_install", stopped)
        with pytest.raises(KeyboardInterrupt):
            bootstrap.set_up(checkout, True, "")
    assert called[-1] == stop_at
    assert not bootstrap.is_ready(checkout, True, "") and not bootstrap.is_ready(checkout, False, "")
    inode = venv.stat().st_ino
    bootstrap.set_up(checkout, True, "")
    assert bootstrap.is_ready(checkout, True, "") and venv.stat().st_ino == inode  # kept, not made anew


def test_torch_comes_first_and_alone_from_its_index(checkout: Path, steps: list[str], venv: Path) -> None:
    (venv / "torch-index").write_text("https://example.org/whl")
    bootstrap.set_up(checkout, False, "https://example.org/whl")
    assert steps[:2] == ["--index-url https://example.org/whl --no-deps torch==2.13.0", "-r requirements.txt"]


def test_the_choice_of_torch_is_kept_until_another(checkout: Path, venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (venv / "torch-index").write_text("https://example.org/whl")
    monkeypatch.delenv("TORCH_INDEX", raising=False)
    assert bootstrap.chosen_torch_index(checkout) == "https://example.org/whl"
    monkeypatch.setenv("TORCH_INDEX", "https://example.org/other")
    assert bootstrap.chosen_torch_index(checkout) == "https://example.org/other"


# --- a damaged .venv ---


@pytest.mark.parametrize("damage", ["no pip", "no python", "dead link", "empty", "other torch"])
def test_a_half_made_venv_is_made_anew(checkout: Path, venv: Path, steps: list[str], damage: str) -> None:
    python = venv / "bin" / "python"
    if damage == "no pip":
        (site_packages(venv) / "pip.py").unlink()
    elif damage == "no python":
        python.unlink()
    elif damage == "dead link":
        python.unlink()
        python.symlink_to(checkout / "gone")
    elif damage == "empty":
        shutil.rmtree(venv)
        venv.mkdir()
    else:
        (venv / "torch-index").write_text("https://example.org/other")
    bootstrap.set_up(checkout, False, "")
    works = subprocess.run([str(python), "-m", "pip", "--version"], capture_output=True)
    assert works.returncode == 0 and bootstrap.is_ready(checkout, False, "")


def test_a_venv_whose_python_is_gone_is_not_ready(checkout: Path, venv: Path, steps: list[str]) -> None:
    bootstrap.set_up(checkout, False, "")
    (venv / "bin" / "python").unlink()
    assert not bootstrap.is_ready(checkout, False, "")


def test_half_installed_packages_are_installed_again(venv: Path) -> None:
    site = site_packages(venv)
    for name, record in (
        ("whole-1", "x.py,,\nwhole-1.dist-info/INSTALLER,,\n"),
        ("cut-1", "x.py,,\n"),
        ("bare-1", None),
    ):
        (site / f"{name}.dist-info").mkdir()
        if record is not None:
            (site / f"{name}.dist-info" / "RECORD").write_text(record)
    (site / "~orch").mkdir()
    assert sorted(bootstrap.drop_half_installed(venv)) == ["bare", "cut"]
    assert sorted(path.name for path in site.iterdir() if path.suffix == ".dist-info") == ["whole-1.dist-info"]
    assert not (site / "~orch").exists()


# --- pip ---


def pip_that(venv: Path, text: str, code: int) -> None:
    (site_packages(venv) / "pip.py").write_text(f"import sys\nprint({text!r})\nsys.exit({code})\n")


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        ("ERROR: No matching distribution found for torch==2.13.0", "is TORCH_INDEX right"),
        ("NewConnectionError: Failed to establish", "look at the network"),
        ("something else", "see the lines above"),
    ],
)
def test_a_failure_of_pip_names_step_cause_and_remedy(checkout: Path, venv: Path, text: str, advice: str) -> None:
    (checkout / "build").mkdir()
    pip_that(venv, text, 1)
    with pytest.raises(bootstrap.CannotSetUp) as caught:
        bootstrap.pip_install(checkout, "locked packages", "-r", "requirements.txt")
    said = str(caught.value)
    assert "the step 'locked packages'" in said and text in said and advice in said and "goes on from here" in said
    assert text in (checkout / "build" / "setup.log").read_text()


def test_progress_is_shown_and_noise_is_not(checkout: Path, venv: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkout / "build").mkdir()
    lines = ["WARNING: Location 'x' is ignored", *(f"Collecting p{n}==1" for n in range(25))]
    lines += ["  Downloading torch-2.13.0-cp311.whl (190.2 MB)", "Installing collected packages: a, b"]
    pip_that(venv, "\n".join(lines), 0)
    bootstrap.pip_install(checkout, "x", "-r", "requirements.txt")
    said = capsys.readouterr().out.split("\n")
    assert [line.strip() for line in said if line] == [
        "25 packages found, at p24==1",
        "downloading torch-2.13.0-cp311.whl (190.2 MB)",
        "unpacking 2 packages",
    ]


def test_an_interruption_ends_pip_too(checkout: Path, venv: Path) -> None:
    (checkout / "build").mkdir()
    (site_packages(venv) / "pip.py").write_text("import time\nprint('started', flush=True)\ntime.sleep(60)\n")
    with pytest.raises(KeyboardInterrupt), bootstrap.start([str(venv / "bin/python"), "-m", "pip"], checkout) as pip:
        assert pip.stdout is not None and pip.stdout.readline() == "started\n"
        raise KeyboardInterrupt
    assert pip.returncode is not None


def test_settings_that_send_packages_elsewhere_are_left_out(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in bootstrap.UNWANTED:
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("PIP_INDEX_URL", "https://example.org")
    env = bootstrap.clean_env(checkout)
    assert not set(bootstrap.UNWANTED) & set(env) and env["PIP_INDEX_URL"] == "https://example.org"
    assert Path(env["TMPDIR"]).is_dir() and Path(env["TMPDIR"]).is_relative_to(checkout)


# --- the whole program ---


def test_a_problem_ends_in_one_plain_message(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bootstrap.py"])
    hide(monkeypatch, "ensurepip")
    assert bootstrap.main(checkout) == 1
    said = capsys.readouterr().err
    assert "set-up stopped:" in said and "apt install" in said and "Traceback" not in said
    assert not (checkout / ".venv").exists()


def test_a_second_set_up_waits(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with bootstrap.alone(checkout):
        script_text = (
            "from pathlib import Path; from tools import bootstrap\n"
            f"with bootstrap.alone(Path({str(checkout)!r})): print('in')"
        )
        second = subprocess.Popen(
            [sys.executable, "-c", script_text], cwd=ROOT, stdout=subprocess.PIPE, text=True, env=dict(os.environ)
        )
        assert second.stdout is not None and "waiting" in second.stdout.readline()
    assert second.communicate(timeout=20)[0] == "in\n"
