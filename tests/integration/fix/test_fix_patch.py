"""`flatout fix --diff --apply`: what was kept, as edits of the person's own files."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from test_fix_command import SLOW_DISK, environment, fix

from flatout.trace import read

pytestmark = pytest.mark.timeout(420)


def git(folder: Path, *words: str) -> str:
    name = ("-c", "user.name=x", "-c", "user.email=x@example.com")
    return subprocess.run(["git", *name, *words], cwd=folder, check=True, capture_output=True, text=True).stdout


def test_a_starved_training_is_fixed_for_good(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SLOW_DISK).lstrip())
    before = script.read_text()
    git(tmp_path, "init")
    git(tmp_path, "add", "train.py")
    git(tmp_path, "commit", "-m", "slow")

    ended = fix(
        tmp_path,
        *("--steps", "80", "--only", "loader", "--diff", "fix.diff", "--apply"),
        *("--", sys.executable, "train.py"),
    )

    # THEN the script is edited, and what it was lies beside it
    assert ended.returncode == 0, ended.stderr
    after = script.read_text()
    assert after == before.replace(
        "import DataLoader, Dataset\n", "import DataLoader, Dataset\nimport flatout\n"
    ).replace(
        "DataLoader(Slow(), batch_size=args.batch_size, shuffle=True)",
        'flatout.DataLoader(Slow(), batch_size=args.batch_size, shuffle=True, num_workers="auto")',
    )
    assert (tmp_path / "train.py.orig").read_text() == before
    # AND the patch says the same to git
    git(tmp_path, "checkout", "train.py")
    git(tmp_path, "apply", "fix.diff")
    assert script.read_text() == after
    # AND the change is in force without a plan
    command = [sys.executable, "-m", "flatout", "run", "--quiet", "--max-steps", "40", "--trace", "run", "--"]
    subprocess.run([*command, sys.executable, "train.py"], cwd=tmp_path, env=environment(), check=True, timeout=120)
    assert read(tmp_path / "run").ranks[0].facts.training_loader.elastic
