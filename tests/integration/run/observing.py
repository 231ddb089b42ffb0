"""How the tests of `flatout run` record a training: inside this process, or as a command beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flatout import trace
from flatout.diagnose.breakdown import Breakdown, breakdown
from flatout.inside.recorder import Sampling
from flatout.inside.recording import process
from flatout.inside.start import Settings
from flatout.launch.protocol import Options
from flatout.trace import RankTrace, Step

FLATOUT = (sys.executable, "-m", "flatout")


@dataclass
class Observed:
    """What a recording says about one rank."""

    rank: RankTrace

    @property
    def steps(self) -> list[Step]:
        """The training steps, without the first one, in which everything is found out."""
        return [step for step in self.rank.steps if step.kind == "train"]

    @property
    def breakdown(self) -> Breakdown:
        return breakdown(self.rank)

    def count(self, name: str) -> int:
        """In how many training steps a phase occurs."""
        return sum(any(span.name == name for span in step.spans) for step in self.steps)

    def ms(self, name: str) -> float:
        """Milliseconds of a phase in the training steps and the tail."""
        steps = [step for step in self.rank.steps if step.kind in ("train", "tail")]
        return sum(span.host_ms for step in steps for span in step.spans if span.name == name)

    def samples(self) -> int:
        """Samples of all steps, the first one too."""
        return sum(step.samples or 0 for step in self.rank.steps)


def observe(folder: Path, train: Callable[[], Any], *, closely: bool = True) -> Observed:
    """Record `train()` in this process, looking closely at every step, or at the first two alone."""
    at_first = 10**9 if closely else 2
    sampling = Sampling(at_first=at_first, seldom=10**9, share=1e-9, later_share=1e-9)
    process.roots.note_living()
    recording = process.begin(Options(folder=folder, name="test"), Settings(), sampling=sampling)
    try:
        train()
    finally:
        recording.close()
    return Observed(trace.read(folder).ranks[0])


@dataclass
class Run:
    """A finished `flatout run`."""

    code: int
    out: str
    err: str
    folder: Path
    account: dict[str, Any] | None = field(repr=False)

    @property
    def observed(self) -> Observed:
        return Observed(trace.read(self.folder).ranks[0])

    def text(self) -> str:
        """Every byte of the trace."""
        return "".join(path.read_text() for path in sorted(self.folder.rglob("*")) if path.is_file())


def write(folder: Path, **scripts: str) -> None:
    """Put scripts into a folder: `write(tmp_path, train="…")` makes train.py."""
    for name, text in scripts.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text), encoding="utf-8")


def flatout_run(folder: Path, *command: str, options: tuple[str, ...] = (), env: dict[str, str] | None = None) -> Run:
    """`flatout run OPTIONS -- COMMAND` in `folder`, to its end."""
    return finish(folder, subprocess.Popen(**call(folder, *command, options=options, env=env)))


def call(
    folder: Path, *command: str, options: tuple[str, ...] = (), env: dict[str, str] | None = None
) -> dict[str, Any]:
    """How to start it, for subprocess.Popen."""
    words = [*FLATOUT, "run", "--trace", "trace", "--json", "account.json", *options, "--", *command]
    return {
        "args": words,
        "cwd": folder,
        "env": {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }


def finish(folder: Path, process: subprocess.Popen[str]) -> Run:
    """Wait for it, and read what it left."""
    out, err = process.communicate(timeout=120)
    account = folder / "account.json"
    return Run(
        code=process.returncode,
        out=out,
        err=err,
        folder=folder / "trace",
        account=json.loads(account.read_text()) if account.exists() else None,
    )
