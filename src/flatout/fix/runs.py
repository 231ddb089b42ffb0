"""One run of the user's command in the sandbox, and what it measured.

`Runner` makes runs (`Launcher` really does, tests simulate them); a `Run` is what became of one, read
from what it left in its folder. Most runs are timed trials; a `ProofRun` is one with fingerprints,
that nobody times.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from flatout.diagnose.knobs import knobs
from flatout.diagnose.rank_metrics import RankMetrics, metrics_of
from flatout.fix.edits import Edit
from flatout.fix.speed import Speed, measure
from flatout.launch import launcher, sandbox
from flatout.launch.protocol import TURNS, WEIGHTS_OVER, Trial, reasons_not_measured
from flatout.model.changes import why_without_effect
from flatout.model.errors import OverlayError, TraceError
from flatout.model.plan import Change, Plan
from flatout.model.records import AppliedChange
from flatout.model.stats import Gain
from flatout.model.turns import TurnsResult
from flatout.redact import redact_text
from flatout.trace import Trace, read

EDIT = "edit"  # the name of the change that stands for an edit of the person's own; its value names the edit
SEED = 20_261  # imposed where the script sets none: the same in every run
CEILING = ("replay", "resident")  # kinds of steps
LOOKING = (*CEILING, "xray", "after xray")
SHORT_EPOCH_S = 30.0
_TAIL_BYTES = 20_000
_MOST_WEIGHTS, _WEIGHTS_SHARE = 8 << 30, 0.1  # bytes, and of the free disk; two may lead
_MEMORY_FOR_RUNS = 0.7  # of a GPU's or the host's, for runs side by side
_CORES_A_RUN = 2
_LINE_ENDS = re.compile(r"[\r\n]")
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_ERROR = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception(?! raised from)|Interrupt|Exit|Refused)\b.*")
_NOT_COPIED = re.compile(r"Errno 75\b|errno = 75\b|Value too large for defined data type")  # EOVERFLOW
_READ_ONLY = re.compile(r"Errno 30\b|errno = 30\b|Read-only file system")  # EROFS
_NO_MEMORY = re.compile(r"CUDA (?:error: )?out of memory", re.I)


class WeightMove(NamedTuple):
    """How far weights have come since they were another run's: as a share of its way, and in how much
    its direction (a cosine)."""

    length: float
    direction: float

    def as_far(self, within: float) -> bool:
        """Whether as far as the other run's, within such a factor.

        On their own, since other random numbers in the model (dropout) turn them elsewhere; or along
        the other's way, since rounding alone moves weights that nothing else does (a bias before a
        batch norm).
        """
        return any(1 / within <= far <= within for far in (self.length, self.length * self.direction))


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """One tensor of a run that followed another."""

    name: str
    size: int
    dims: int
    drift: float  # how far off it is in all, as a share of the other's way
    coherence: float  # how many times as far as chance alone would make it
    length: float  # how long its way typically was, as a share of the other's
    pace: float  # how fast the other's moves, beside that one's other tensors
    apart: float = 0.0  # how far off it is after a few steps from the same, as a share of the other's way
    learned: bool = True  # a weight, and no buffer


class Content(NamedTuple):
    """What was in a tensor: its type and shape, its length, and projections on directions drawn by chance.

    So far as these are apart in two tensors, as a share of the length, so far are the tensors, about.
    """

    kind: str = ""  # such as float32[8, 3]
    numbers: tuple[float, ...] = ()


class LearnedGroup(NamedTuple):
    """The weights that one group of an optimizer trains, with their settings; or the buffers of the
    models."""

    kind: str  # the optimizer's class, or "buffers"
    settings: dict[str, Any]
    shapes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofStep:
    """What reached the model in one step of a proof's run."""

    inputs: tuple[str, ...] = ()  # checksums
    indices: tuple[tuple[Any, ...], ...] = ()  # the samples of each batch
    # Where a batch begins a pass over the data: "here" if it was loaded in the training process, or
    # "elsewhere".
    begins: tuple[str | None, ...] = ()
    loss: float | None = None  # the mean of `losses`
    losses: tuple[float, ...] = ()  # of its backward passes
    moved: WeightMove | None = None  # in every fifth step of a run that follows another
    # The rest is in the runs of a `try` alone.
    contents: tuple[Content, ...] = ()  # of the inputs
    learned: tuple[LearnedGroup, ...] = ()  # what is trained; empty where it is as in the step before
    evaluation: ProofStep | None = None  # what reached the model without being learned from, since the step before


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofRun:
    """A run that a proof needs. One that leads has a number; one that follows it goes on from its weights."""

    changes: tuple[Change, ...]
    steps: int
    leads: int = 0
    follows: int = 0


class Runner(Protocol):
    """Runs the user's command."""

    def run(self, changes: Sequence[Change], steps: int, trial: Trial) -> Run:
        """A trial with these changes, of so many steps at least."""
        ...

    def prove(self, requests: Sequence[ProofRun], *, timeout_s: float, at_once: int = 1) -> list[Run]:
        """Runs for a proof, with fingerprints, so many at once. Those that lead come first."""
        ...

    def measure_afresh(self) -> None:
        """What runs from now on is compared with one another: no run of an earlier time may stand in
        for it."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What became of one run. Each change is, by its name, either `applied` or `refused`, with the reason."""

    changes: tuple[Change, ...]
    code: int
    seconds: float
    asked: int = 0  # steps, at the most
    trace: Trace | None = None
    speed: Speed | None = None
    output: str = ""
    applied: dict[str, AppliedChange] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    proof: tuple[tuple[ProofStep, ...], ...] = ()  # a row a rank
    drifts: tuple[Drift, ...] = ()  # of all ranks' weights
    turns: tuple[TurnsResult, ...] = ()
    folder: Path | None = None

    @functools.cached_property
    def metrics(self) -> RankMetrics:
        """Its first rank, as the diagnosis sees it."""
        assert self.trace is not None
        return metrics_of(self.trace)[0]

    @property
    def planned_samples(self) -> float | None:
        """Samples of the whole training, where the script read its number of epochs."""
        epochs = knobs(self.metrics.facts.settings, "epochs", lambda value: type(value) is int)
        if not epochs or not self.samples_an_epoch:
            return None
        return float(epochs[0].value * self.samples_an_epoch)

    @property
    def samples_an_epoch(self) -> float | None:
        """Of all ranks, by what a step was seen to take."""
        steps, seen = self.metrics.steps_an_epoch, self.metrics.breakdown
        if self.trace is None or not steps or not seen.samples:
            return None
        return steps * seen.samples / seen.steps * len(self.trace.ranks)

    def epoch_s(self, speed: Speed) -> float | None:
        """How long one pass over the data takes at a speed, pauses and all."""
        epoch = self.metrics.steps_an_epoch
        if speed.unit == "samples/s":
            epoch = self.samples_an_epoch
        return epoch / speed.with_pauses if epoch else None

    @property
    def short_epoch(self) -> str:
        """A remark where the start of an epoch matters and was not in this run; else nothing."""
        steps = self.metrics.steps_an_epoch or 0.0
        epoch_s = steps * self.step_s
        if self.speed is None or self.speed.steps >= steps or epoch_s >= SHORT_EPOCH_S:
            return ""
        return f"an epoch takes {epoch_s:.0f} s now, and its start may cost more than these figures show"

    @property
    def start_s(self) -> float:
        """What the run took beside its training steps, X-ray, ceiling and turns."""
        if self.trace is None:
            return self.seconds
        looking_ms = sum(step.wall_ms for step in self.trace.ranks[0].steps if step.kind in LOOKING)
        return max(0.0, self.seconds - (self.metrics.breakdown.training_ms + looking_ms) / 1e3 - self.turns_s)

    @property
    def turns_s(self) -> float:
        """What it took to try changes in turns."""
        return sum(result.seconds for result in self.turns)

    @property
    def step_s(self) -> float:
        """Its mean training step."""
        return (self.metrics.breakdown.step_ms.mean or 0.0) / 1e3

    def step_s_with(self, changes: Sequence[Change]) -> float:
        """How long a step with these changes too would take at its speed: a larger batch may take longer."""
        batch = self.metrics.loader.batch_size
        larger = [change.value for change in changes if change.name == "batch_size"]
        return self.step_s * larger[0] / batch if larger and batch else self.step_s

    def with_ceiling_from(self, earlier: Run | None) -> Run:
        """The run, with the X-ray and the ceiling of an earlier one where it has none."""
        if self.trace is None or earlier is None or earlier.trace is None:
            return self
        ranks = list(self.trace.ranks)
        for number, (rank, before) in enumerate(zip(ranks, earlier.trace.ranks, strict=False)):
            steps = rank.steps
            if not any(step.kind in CEILING for step in steps):
                steps = (*steps, *(step for step in before.steps if step.kind in CEILING))
            ranks[number] = replace(rank, xray=rank.xray or before.xray, steps=steps)
        return replace(self, trace=replace(self.trace, ranks=tuple(ranks)))

    @property
    def hung(self) -> bool:
        return self.code == launcher.TIMED_OUT

    @property
    def is_measured(self) -> bool:
        """Whether its speed is known, and it came to an end."""
        return self.speed is not None and not self.hung

    @property
    def broke_off(self) -> bool:
        """Whether a proof's run has come to nothing, or not to the steps asked of it."""
        return self.hung or not self.proof or bool(self.code and min(map(len, self.proof)) < self.asked)

    def why_not_applied(self, change: Change) -> str | None:
        """Why a change was refused; or why its knob had no effect."""
        if change.name in self.refused or not change.knob:
            return self.refused.get(change.name)
        return why_without_effect(change, self.metrics.facts)

    def why_no_baseline(self, steps: int) -> str:
        """Why nothing can be compared with this run of the command as it is, which was to take so
        many steps."""
        taken = self.metrics.breakdown.steps if self.trace is not None else 0
        if self.hung:
            hint = "takes fewer steps (--steps 20), or more time (--budget)" if taken < steps else "does not end"
            pace = f" ({self.step_s:.2g} s a step)" if taken else ""
            return (
                f"the command had taken {taken} of {steps} training steps when it was ended after {self.seconds:.0f} "
                f"s{pace}: it stands still (a process that it waits for may be stuck), or {hint}"
            )
        if self.code != 0:
            hint = "; a trial has nothing to read from stdin" if "EOFError" in self.output else ""
            return f"the command fails by itself: {self.reason()}{hint}"
        if taken:
            return "the command ended after a few steps: too few to measure"
        why = next(iter(reasons_not_measured(self.folder)), None) if self.folder is not None else None
        if why:
            return f"flatout could not look into the command: {why}"
        return "no optimizer step was seen: nothing to fix (does the command train, and with this Python?)"

    def reason(self) -> str:
        """Why it ended as it did, in its own words where it left some."""
        if self.hung:
            return f"it did not come to its end and was ended after {self.seconds:.0f} s"
        if _NO_MEMORY.search(self.output):
            return "the GPU is out of memory"
        lines = self.output.strip().splitlines() or ["no output"]
        error = next((line for line in reversed(lines) if _ERROR.match(line)), lines[-1])
        reason = f"exit code {self.code}: {error.strip()[:160]}"
        frames = [m for m in _FRAME.finditer(self.output) if "-packages" not in m[1] and "/flatout/" not in m[1]]
        if frames:
            reason += f" at {Path(frames[-1][1]).name}:{frames[-1][2]}"
        return reason


def runs_at_once(before: Run, now: Run) -> int:
    """How many runs of one process have room side by side: on one GPU and one host, with cores for each."""
    total = now.metrics.machine.gpu("memory_total_bytes").high
    reserved = max(run.metrics.facts.memory_reserved_bytes or 0 for run in (before, now))
    if not reserved or not math.isfinite(total) or now.metrics.rank.info.world_size > 1:
        return 1
    fit = min(total / reserved, before.metrics.machine.fits_in_memory, now.metrics.machine.fits_in_memory)
    return max(1, min(int(_MEMORY_FOR_RUNS * fit), int((now.metrics.machine.cores or 0) / _CORES_A_RUN)))


class Launcher:
    """The real runner: each run is a trial of `launch`, in a folder of its own, and writes nothing of
    the user's.

    By an `overlay` or by redirection; None: as the system permits. With `edits`, by name, a run may
    have one of them, and proofs are recorded closely. Raises OverlayError where a run fails because
    of its overlay, and RealWriteError where one has written all the same.
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        *,
        overlay: bool | None = None,
        edits: Mapping[str, Edit] | None = None,
    ) -> None:
        self._command = list(command)
        self._edits = edits
        self._folder = folder
        self._overlay = overlay
        self._numbers = itertools.count(1)

    def run(self, changes: Sequence[Change], steps: int, trial: Trial) -> Run:
        # The weights of a proof that is over may take gigabytes.
        for weights in self._folder.glob("weights-*"):
            shutil.rmtree(weights, ignore_errors=True)
        return self._run(changes, steps, trial)

    def _run(self, changes: Sequence[Change], steps: int, trial: Trial) -> Run:
        folder = self._folder / f"{next(self._numbers):02d}"
        plan, start_s = Plan(changes=tuple(change for change in changes if change.name != EDIT)), time.monotonic()
        edit = next((self._edits[change.value] for change in changes if change.name == EDIT and self._edits), None)
        command = list(edit.command) if edit is not None else self._command
        self._folder.mkdir(exist_ok=True)
        if self._overlay is None:
            self._overlay = not sandbox.why_no_overlay(self._command, self._folder)
        with tempfile.TemporaryDirectory(prefix="scratch-", dir=self._folder, ignore_cleanup_errors=True) as scratch:
            sandboxed = replace(trial, seed=SEED, protect=Path(scratch), overlay=self._overlay)
            if edit is not None and edit.layer is not None:
                sandboxed = replace(sandboxed, layer=edit.layer.absolute())
            xray = not trial.fingerprints
            code = launcher.run(command, folder=folder, max_steps=steps, xray=xray, plan=plan, trial=sandboxed)
        run = recorded(tuple(changes), code, time.monotonic() - start_s, folder, asked=steps)
        self._check_overlay(run, first=folder.name == "01")
        return run

    def _check_overlay(self, run: Run, *, first: bool) -> None:
        """Raise OverlayError where a run has failed because of its overlay.

        A disk takes none, or files of others could not be copied into it; the latter may be why the
        `first` run fails without saying so (torch.save does not).
        """
        if run.code in (0, launcher.TIMED_OUT) or not self._overlay:
            return
        if _READ_ONLY.search(run.output):
            raise OverlayError(f"a disk that takes none can only be read: {run.reason()}")
        not_copied = _NOT_COPIED.search(run.output)
        if sandbox.may_mount() or not (not_copied or first):
            return
        theirs = sandbox.file_of_others(self._command)
        why = f"{theirs or 'what it writes to'} belongs to another user or group, and without root it cannot hold that"
        if not_copied:
            raise OverlayError(why)
        if theirs:
            raise OverlayError(f"{why}, which may be why the command fails: {run.reason()}")

    def _prove(self, request: ProofRun, timeout_s: float) -> Run:
        leads, follows = self._weights(request.leads), self._weights(request.follows)
        closely = self._edits is not None
        trial = Trial(fingerprints=True, closely=closely, leads=leads, follows=follows, timeout_s=timeout_s)
        if leads is not None:
            room = int(_WEIGHTS_SHARE * shutil.disk_usage(leads).free)
            trial = replace(trial, weights_bytes=min(_MOST_WEIGHTS, room))
        try:
            return self._run(request.changes, request.steps, trial)
        finally:
            if leads is not None:
                (leads / WEIGHTS_OVER).touch()  # those that follow wait for no more

    def _weights(self, leader: int) -> Path | None:
        if not leader:
            return None
        folder = self._folder.absolute() / f"weights-{leader}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def prove(self, requests: Sequence[ProofRun], *, timeout_s: float, at_once: int = 1) -> list[Run]:
        if len(requests) == 1:
            return [self._prove(requests[0], timeout_s)]
        under_way: set[int] = set()
        over = threading.Event()

        def start(one: ProofRun) -> Run | None:
            me = threading.get_ident()
            under_way.add(me)
            try:
                if over.is_set():
                    return None
                return self._prove(one, timeout_s)
            finally:
                under_way.discard(me)

        with ThreadPoolExecutor(at_once) as pool, launcher.signals_as_ctrl_c():
            try:
                runs = [pool.submit(start, one) for one in requests]
                while not all(run.done() for run in runs):
                    # A signal is only heard between two waits; and an error in one run ends the others.
                    wait(runs, timeout=0.2)
                    for run in runs:
                        if run.done():
                            run.result()
            except BaseException:
                over.set()  # those that have not begun never do
                # Each run is in a session of its own, which no signal to us reaches. One that is only
                # starting is ended in the next round.
                while under_way:
                    for folder in self._folder.iterdir():
                        launcher.end(folder)
                    time.sleep(0.2)
                raise
            return [run for run in (run.result() for run in runs) if run is not None]

    def measure_afresh(self) -> None:
        """It never does anything else."""


def recorded(changes: tuple[Change, ...], code: int, seconds: float, folder: Path, *, asked: int = 0) -> Run:
    """A run from what it left in its folder."""
    run = Run(
        changes=changes,
        code=code,
        seconds=seconds,
        asked=asked,
        output=end_of(folder / launcher.OUTPUT),
        proof=tuple(_proof_steps(path) for path in sorted(folder.glob("proof-*.jsonl"))),
        drifts=tuple(Drift(**row) for path in sorted(folder.glob("drifts-*.json")) for row in _json(path)),
        turns=tuple(turns for path in folder.glob(TURNS) for turns in _turns(path)),
        folder=folder,
    )
    try:
        trace = read(folder)
    except TraceError:
        return run
    if not trace.ranks:
        return run
    changed = trace.ranks[0].facts.changes
    return replace(
        run,
        trace=trace,
        speed=measure(trace),
        applied={change.name: change for change in changed if change.applied},
        refused={change.name: change.how or "no reason given" for change in changed if not change.applied},
    )


def end_of(output: Path, most: int = _TAIL_BYTES) -> str:
    """The last lines of what a command has printed, without secrets."""
    try:
        with output.open("rb") as file:
            before = max(0, file.seek(0, 2) - most)
            file.seek(before)
            printed = file.read().decode(errors="replace")
    except OSError:
        return ""
    whole = _LINE_ENDS.search(printed)
    if before and whole is not None:  # a line cut short may hold half a secret
        printed = printed[whole.end() :]
    return redact_text(printed)


def _turns(path: Path) -> list[TurnsResult]:
    return [TurnsResult(**row | {"gain": row["gain"] and Gain(**row["gain"])}) for row in _json(path)]


def _json(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return rows


def _proof_steps(path: Path) -> tuple[ProofStep, ...]:
    return tuple(_proof_step(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines())


def _proof_step(data: dict[str, Any]) -> ProofStep:
    return ProofStep(
        inputs=tuple(data["inputs"]),
        indices=tuple(tuple(batch) for batch in data["indices"]),
        begins=tuple(data["begins"]),
        loss=data["loss"],
        losses=tuple(data["losses"]),
        moved=WeightMove(*data["moved"]) if data["moved"] else None,
        contents=_contents(data),
        learned=tuple(LearnedGroup(kind, known, tuple(shapes)) for kind, known, shapes in data.get("learned", ())),
        evaluation=_evaluated(data["evaluation"]) if data.get("evaluation") else None,
    )


def _evaluated(data: dict[str, Any]) -> ProofStep:
    return ProofStep(
        inputs=tuple(data["inputs"]),
        indices=tuple(tuple(batch) for batch in data["indices"]),
        contents=_contents(data),
    )


def _contents(data: dict[str, Any]) -> tuple[Content, ...]:
    return tuple(Content(kind, tuple(numbers)) for kind, numbers in data.get("contents", ()))
