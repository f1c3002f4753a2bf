"""scripts/setup.sh as its callers see it, with a fake pip; tests/run.sh runs the real one."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest

from tests.limits import HANGS_S, wait_until

REPO = Path(__file__).parents[2]

# Shadows the real modules through PYTHONPATH. Records each call; the variable FAKE_PIP sets the outcome.
FAKE_PIP = """
import os, signal, sys, time
with open(os.environ["PIP_CALLS"], "a") as calls:
    print(*sys.argv[1:], file=calls)
with open(os.environ["PIP_CALLS"] + ".parent", "w") as parent:
    print(os.getppid(), file=parent)
how = os.environ.get("FAKE_PIP", "works")
end = time.monotonic() + 600  # a test that has failed lets nobody go on
while not os.path.exists(os.environ.get("FAKE_PIP_WAITS_FOR", "/")) and time.monotonic() < end:
    time.sleep(0.02)
if how == "is killed":
    os.kill(os.getpid(), signal.SIGKILL)
elif how == "is offline":
    print("WARNING: Retrying ... NewConnectionError: [Errno -3] Temporary failure in name resolution")
    sys.exit("ERROR: No matching distribution found for torch==2.13.0")
elif how == "fills the disk":
    sys.exit("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device")
elif how == "finds nothing":
    sys.exit("ERROR: No matching distribution found for torch==2.13.0")
"""
CALLER = """
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/setup.sh"EXTRAS
echo "$PYTHON" "$*" ${PYTHONUTF8-}
"""


class Checkout:
    """A copy of the files that setup.sh needs, in a folder with a space in its name, and programs that source it."""

    def __init__(self, folder: Path):
        self.root = folder / "a path with spaces" / "checkout"
        self.venv = self.root / ".venv"
        self.calls = folder / "pip_calls"
        self.fakes = folder / "fakes"
        for module, source in (("pip", FAKE_PIP), ("ensurepip", "")):
            (self.fakes / module).mkdir(parents=True)
            (self.fakes / module / "__init__.py").write_text("")
            (self.fakes / module / "__main__.py").write_text(source)
        chapter = self.root / "chapters" / "00_single"
        chapter.mkdir(parents=True)
        (chapter / "train.sh").write_text(CALLER.replace("EXTRAS", ""))
        (chapter / "with_extras.sh").write_text(CALLER.replace("EXTRAS", " dev,docs"))
        shutil.copytree(REPO / "scripts", self.root / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "constraints.txt"):
            shutil.copy(REPO / name, self.root)

    def start(self, *flags: str, program: str = "train.sh", **environment: str) -> subprocess.Popen:
        """Starts a chapter's train.sh from another folder."""
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONUTF8"}  # tests/run.sh sets it
        path = {"PYTHON": sys.executable, "PYTHONPATH": str(self.fakes), "PIP_CALLS": str(self.calls)}
        return subprocess.Popen(
            ["bash", self.root / "chapters" / "00_single" / program, *flags],
            cwd="/",
            env={**kept, **path, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *flags: str, **options: str) -> tuple[int, list[str], str]:
        """Returns the status, the lines of stderr, and stdout."""
        process = self.start(*flags, **options)
        out, err = process.communicate(timeout=HANGS_S)
        return process.returncode, err.splitlines(), out.strip()

    def pip_calls(self) -> list[str]:
        return self.calls.read_text().splitlines() if self.calls.exists() else []


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


def test_the_first_start_makes_an_environment_and_the_second_is_one_line(checkout):
    status, lines, out = checkout.run("--nproc", "2", LC_ALL="C.UTF-8")
    assert status == 0, lines
    assert out == f"{checkout.venv}/bin/python --nproc 2"  # and the caller's flags are unchanged
    assert checkout.pip_calls() == ["install --progress-bar off -c constraints.txt -e ."]
    assert any(line.startswith(f"setup: making {checkout.venv} with torch") and "minutes" in line for line in lines)

    (checkout.fakes / "torch").mkdir()  # the slow part of a start
    (checkout.fakes / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')")
    # a locale without Chinese, and settings of Python that hide modules of the script's folder and docstrings
    status, lines, out = checkout.run("--nproc", "2", LC_ALL="C", PYTHONSAFEPATH="1", PYTHONOPTIMIZE="2")
    assert (status, lines) == (0, [f"setup: using {checkout.venv}"])
    assert out == f"{checkout.venv}/bin/python --nproc 2 1", "Python in UTF-8"
    assert len(checkout.pip_calls()) == 1


def test_an_environment_with_torch_but_without_this_checkout_is_told_how_to_get_it(checkout):
    (checkout.fakes / "torch").mkdir()
    (checkout.fakes / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')")
    _, lines, _ = checkout.run()
    assert "has torch but lacks" in lines[0] and "-m pip install -e" in lines[0]


@pytest.mark.parametrize("script, line", [
    ("import sys; print('pstar: CPU kernels are ready', file=sys.stderr)", "pstar: CPU kernels are ready"),
    ("raise SystemExit('pstar: no compiler')", "pstar: no compiler"),
])
def test_kernels_are_built_after_installation_and_a_failure_is_one_line(checkout, script, line):
    build = checkout.root / "pstar" / "kernels" / "build.py"
    build.parent.mkdir(parents=True)
    build.write_text(script)
    status, lines, _ = checkout.run()
    assert status == 0 and lines.count(line) == 1
    assert checkout.run()[1] == [f"setup: using {checkout.venv}"]


def test_extras_are_added_once_and_kept(checkout):
    checkout.run()
    checkout.run(program="with_extras.sh")
    checkout.run(program="with_extras.sh")
    checkout.run()
    assert [call.split()[-1] for call in checkout.pip_calls()] == [".", ".[dev,docs]"]
    (checkout.root / "constraints.txt").write_text("# others\n")
    checkout.run()  # asks for no extras, but updates the installed ones with the rest
    assert checkout.pip_calls()[-1].endswith(".[dev,docs]")


@pytest.mark.parametrize("name", ["constraints.txt", "pyproject.toml"])
def test_a_change_of_the_recipe_is_followed(checkout, name):
    checkout.run()
    with open(checkout.root / name, "a") as file:
        file.write("# changed\n")
    _, lines, _ = checkout.run()
    assert lines[0].startswith("setup: updating")
    assert len(checkout.pip_calls()) == 2


def test_a_moved_checkout_is_installed_anew(checkout):
    checkout.run()
    checkout.root = checkout.root.rename(checkout.root.with_name("moved"))
    assert checkout.run()[1][0].startswith("setup: updating")


@pytest.mark.parametrize(
    "how, line",
    [
        ("is killed", "error: pip was killed by signal 9; the next start begins anew"),
        ("is offline", "error: pip cannot reach the package index"),
        ("fills the disk", "error: the disk is full"),
        ("finds nothing", "error: pip failed: No matching distribution found for torch==2.13.0; there may be none for"),
    ],
)
def test_a_failing_pip_ends_with_one_line_and_the_next_start_recovers(checkout, how, line):
    status, lines, out = checkout.run(FAKE_PIP=how)
    assert status == 2 and out == ""
    assert lines[-1].startswith(line) and len([text for text in lines if text.startswith("error")]) == 1
    status, lines, _ = checkout.run()
    assert status == 0 and "half-made" in lines[0] + lines[1]
    assert len(checkout.pip_calls()) == 2


def test_an_update_that_cannot_reach_the_index_leaves_the_old_environment(checkout):
    checkout.run()
    (checkout.root / "constraints.txt").write_text("# others\n")
    assert checkout.run(FAKE_PIP="is offline")[0] == 2
    assert checkout.run()[1][0].startswith("setup: updating")  # not created again


def test_two_starts_at_once_install_once(checkout):
    go = checkout.root / "go"
    first = checkout.start(FAKE_PIP_WAITS_FOR=str(go))
    wait_until(checkout.pip_calls, "pip", lambda: first.poll() is None)
    second = checkout.start(FAKE_PIP_WAITS_FOR=str(go))
    assert any("another start is making .venv; waiting" in line for line in second.stderr)  # reads until the line comes
    go.touch()
    assert not any("waiting" in start.communicate(timeout=HANGS_S)[1] for start in (first, second))
    assert [first.returncode, second.returncode] == [0, 0]
    assert len(checkout.pip_calls()) == 1


def test_a_killed_start_leaves_no_stale_lock(checkout):
    go, parent = checkout.root / "go", Path(f"{checkout.calls}.parent")
    start = checkout.start(FAKE_PIP_WAITS_FOR=str(go))
    wait_until(lambda: parent.exists() and parent.read_text().endswith("\n"), "pip", lambda: start.poll() is None)
    os.kill(int(parent.read_text()), signal.SIGKILL)
    assert start.wait(timeout=HANGS_S) == 2
    following = checkout.start()
    assert any("waiting for it" in line for line in following.stderr)  # waits for the pip that is still running
    go.touch()
    said = following.communicate(timeout=HANGS_S)[1]
    start.communicate(timeout=HANGS_S)  # pip also held its pipes
    assert following.returncode == 0 and "half-made" in said


def test_somebody_elses_folder_is_refused_and_untouched(checkout):
    checkout.venv.mkdir()
    (checkout.venv / "precious").write_text("")
    status, lines, _ = checkout.run()
    assert status == 2 and "was not made by this script" in lines[-1]
    assert [path.name for path in checkout.venv.iterdir()] == ["precious"]


def test_an_environment_whose_python_is_gone_is_made_anew(checkout):
    checkout.run()
    (checkout.venv / "bin" / "python").unlink()
    status, lines, _ = checkout.run()
    assert status == 0 and "half-made or broken" in "".join(lines)


@pytest.mark.skipif(os.geteuid() != 0, reason="starts a program as another user")
@pytest.mark.parametrize("program, said", [
    ("train.sh", "error: no permission for FOLDER/private/python, which .venv needs: for several users "),
    ("with_extras.sh", "error: cannot add dev, docs to .venv in CHECKOUT (Permission denied); clone it where you may write"),
])  # fmt: skip
def test_what_another_user_may_not_do_is_one_line(program, said):
    """Root makes .venv for a class: from a Python in its home, or without what the exercises need."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        checkout = Checkout(Path(folder))
        assert checkout.run()[0] == 0
        private = Path(folder, "private")
        private.mkdir(mode=0o700)
        python = checkout.venv / "bin" / "python"
        python.unlink()
        python.symlink_to(private / "python" if program == "train.sh" else "/usr/bin/python3")
        command = ["bash", checkout.root / "chapters" / "00_single" / program]
        done = subprocess.run(command, cwd="/", user=65534, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True)
    if "no Python 3.11 or newer" in done.stderr:
        pytest.skip("no Python here that another user may run")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(said.replace("FOLDER", folder).replace("CHECKOUT", str(checkout.root)))


def test_no_python_is_one_line(checkout, tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("bash", "dirname"):
        (tools / tool).symlink_to(shutil.which(tool))
    status, lines, _ = checkout.run(PATH=str(tools), PYTHON="")
    assert status == 2
    assert len(lines) == 1
    assert lines[0].startswith("error: no Python 3.11 or newer found; install one, or name it: PYTHON=")


@pytest.mark.skipif(not (REPO / ".git").exists(), reason="a copy without git")
def test_git_of_windows_changes_no_line_ends(tmp_path):
    """Its installer proposes core.autocrlf=true, and bash reads no script with CRLF."""
    write_out = ["git", "-c", "core.autocrlf=true", "checkout-index", f"--prefix={tmp_path}/", "scripts/setup.sh"]
    subprocess.run(write_out, cwd=REPO, check=True)
    assert b"\r" not in (tmp_path / "scripts" / "setup.sh").read_bytes()


# ---- inside setup_environment.py


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """The module in a checkout at `tmp_path`, which seems to be installed in the running environment."""
    script = tmp_path / "scripts" / "setup_environment.py"  # a copy, so that all its paths are below tmp_path
    script.parent.mkdir()
    shutil.copy(REPO / "scripts" / script.name, script)
    monkeypatch.syspath_prepend(str(REPO / "scripts"))
    spec = importlib.util.spec_from_file_location("setup_environment", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert tmp_path / ".venv" == module.VENV
    monkeypatch.setattr(module, "PROJECT", "pretended-project")
    monkeypatch.setattr(module, "PACKAGES", ("pretended_package",))
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "pretended_package").mkdir()
    (tmp_path / "pretended_package" / "__init__.py").write_text("raise AssertionError('imported')")
    (tmp_path / "pretended_project-1.dist-info").mkdir()
    (tmp_path / "pretended_project-1.dist-info" / "METADATA").write_text(
        "Name: pretended-project\nVersion: 1\nRequires-Dist: pytest>=8\n"
        'Requires-Dist: not-there>=1; extra == "dev"\nRequires-Dist: pluggy; extra == "docs"\n'
    )
    return module


def test_an_active_environment_is_used_when_it_holds_all(environment, capsys):
    assert environment.what_is_missing(set()) == []
    assert environment.what_is_missing({"docs"}) == []
    assert environment.what_is_missing({"dev", "docs"}) == ["not-there"]
    assert environment.choose_python({"docs"}) == sys.executable
    assert capsys.readouterr().err == f"setup: using the active environment, {sys.executable}\n"


def test_the_package_of_another_checkout_does_not_count(environment, monkeypatch, tmp_path):
    monkeypatch.setattr(environment, "REPO", tmp_path / "other")
    assert "this checkout" in environment.what_is_missing(set())[0]


def test_an_installation_from_before_a_package_was_added_does_not_count(environment, monkeypatch):
    monkeypatch.setattr(environment, "PACKAGES", ("pretended_package", "newer_package"))
    assert environment.what_is_missing(set()) == ["the package newer_package"]


def test_all_packages_of_the_project_are_looked_for():
    included = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    names = ", ".join(f'"{pattern.removesuffix("*")}"' for pattern in included)
    assert f"\nPACKAGES = ({names})\n" in (REPO / "scripts" / "setup_environment.py").read_text()


def test_a_python_without_venv_names_the_debian_package(environment, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(environment.SetupError, match=r"apt install python3\.\d+-venv"):
        environment.make_venv(set())


def test_a_folder_whose_name_is_not_utf8_is_one_line(environment, monkeypatch):
    """As from a zip of a Chinese Windows, whose names are in GBK."""
    monkeypatch.setattr(environment, "REPO", Path(os.fsdecode(b"/course \xbf\xce")))
    with pytest.raises(environment.SetupError, match=r"is not utf-8, .* rename the folder"):
        environment.make_venv(set())


def test_a_disk_that_is_nearly_full_is_noticed_before_anything_is_made(environment, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("usage", (), {"free": 2**29}))
    with pytest.raises(environment.SetupError, match=r"not enough disk space .* 0\.5 GiB free, 3 needed"):
        environment.make_venv(set())
    assert not environment.VENV.exists()
