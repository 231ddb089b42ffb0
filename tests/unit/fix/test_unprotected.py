"""`flatout fix` where no overlay can be mounted: refused, or allowed and ended at the first real write."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flatout.launch import sandbox

Run = Callable[..., tuple[int, str, str]]

WRITES = """
import os, subprocess
open("by-python.txt", "w").write("goes to a copy")
home = os.path.expanduser("~")
subprocess.run(f"echo >> results.csv; touch 'by shell.txt' {home}/db.sqlite", shell=True)
subprocess.run("rm stale.txt; mkdir -p a; touch a/b", shell=True)
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder in which a script writes by a shell, on a system that permits no overlay."""
    folder = tmp_path / "home" / "project"
    folder.mkdir(parents=True)
    (folder / "train.py").write_text(WRITES)
    for name in ("results.csv", "stale.txt"):
        (folder / name).write_text(name)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sandbox, "why_no_overlay", lambda *_: "unshare: Operation not permitted")
    return folder


def test_it_is_refused_before_the_first_trial(flatout_says: Run, project: Path) -> None:
    before = sorted(project.iterdir())
    code, out, err = flatout_says("fix", "--", sys.executable, "train.py")
    assert (code, out) == (2, "")
    for word in ("no overlay", "Operation not permitted", "SYS_ADMIN", "--unprotected", "other programs", "sqlite"):
        assert word in err
    assert sorted(project.iterdir()) == before


def test_what_is_not_covered_is_said_before_and_a_real_write_ends_it(flatout_says: Run, project: Path) -> None:
    code, out, err = flatout_says(
        "fix", "--unprotected", "--json", "fix.json", "--html", "fix.html", "--", sys.executable, "train.py"
    )
    assert code == 1
    # THEN it was said what may happen, before the first trial
    before, _, after = " ".join(err.split()).partition("… run 1: the command as it is")
    assert "repeats the requests that the script itself sends" in before
    assert "Your files are protected in part only (unshare: Operation not permitted)" in before
    assert "not covered are other programs" in before
    # AND every file is named, wherever it is told
    written = [f"{project.parent}/db.sqlite"]
    written += [f"{project}/{name}" for name in ("a/b", "by shell.txt", "results.csv", "stale.txt")]
    result = json.loads((project / "fix.json").read_text())
    assert result["written"] == written
    page = (project / "fix.html").read_text()
    for name in written:
        assert name in after
        assert name in page
        assert name.split()[0].rpartition("/")[2] in out.replace("\n", "")
    # AND nothing else was written, nor kept
    assert not (project / "by-python.txt").exists()
    assert result["kept"] == []
