"""One run of the user's command with a plan: as data, and how it is really started."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from flatout.diagnose.knobs import knobs
from flatout.diagnose.rank_metrics import RankMetrics, cases
from flatout.diagnose.rules import diagnose
from flatout.fix.speed import Speed, measure
from flatout.launch import launcher, sandbox
from flatout.launch.protocol import WEIGHTS_OVER, Trial
from flatout.model.changes import why_without_effect
from flatout.model.errors import OverlayError, TraceError
from flatout.model.plan import Change, Plan
from flatout.redact import redact_text
from flatout.trace import Trace, read

SEED = 20_261  # imposed where the script sets none: the same in every run
CEILING = ("replay", "resident")  # kinds of steps
LOOKING = (*CEILING, "xray", "after xray")
_TAIL_BYTES = 20_000
_STANDS_STILL_S = 20.0
SHORT_EPOCH_S = 30.0
WEIGHTS_BYTES, _WEIGHTS_SHARE = 8 << 30, 0.1  # of the free disk; two may lead
_LINE_ENDS = re.compile(r"[\r\n]")
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_ERROR = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception(?! raised from)|Interrupt|Exit|Refused)\b.*")
_UNMEASURED = re.compile(r"flatout: not measuring this process \((.*)\)$")
_NOT_COPIED = re.compile(r"Errno 75\b|errno = 75\b|Value too large for defined data type")  # EOVERFLOW
_READ_ONLY = re.compile(r"Errno 30\b|errno = 30\b|Read-only file system")  # EROFS
_NO_MEMORY = re.compile(r"CUDA (?:error: )?out of memory", re.I)


class WeightMove(NamedTuple):
    """How far weights have come since they were those of another run, in terms of how far that one's have, and how much
    in the same direction (a cosine)."""

    length: float
    direction: float

    def as_far(self, within: float) -> bool:
        """Whether as far, within such a factor: by itself, since other random numbers in the model (dropout) turn it
        elsewhere; or along the other's way, since rounding alone moves weights that nothing else does (a bias before a
        batch norm)."""
        return any(1 / within <= far <= within for far in (self.length, self.length * self.direction))


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """One tensor of a run that followed another: how far off in all, as a share of the other's way, and how many times
    as far as chance alone would make it; how long its way was each time, typically, in terms of the other's; and the
    other's pace beside that of its other tensors."""

    name: str
    size: int
    dims: int
    drift: float
    coherence: float
    length: float
    pace: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofStep:
    """What reached the model in a step: checksums of its inputs, the samples of each batch, and the loss: the mean of
    the `losses` of its backward passes. In every fifth, how the weights `moved`.

    For each batch that `begins` a pass over the data, whether it was loaded "here", in the training process.
    """

    inputs: tuple[str, ...] = ()
    indices: tuple[tuple[Any, ...], ...] = ()
    begins: tuple[str | None, ...] = ()
    loss: float | None = None
    losses: tuple[float, ...] = ()
    moved: WeightMove | None = None


@dataclass(frozen=True, kw_only=True)
class Run:
    """What became of one run. For each change: how it was `made` and `where`, or why it was `refused`."""

    changes: tuple[Change, ...]
    code: int
    seconds: float
    asked: int = 0  # steps, at the most
    trace: Trace | None = None
    speed: Speed | None = None
    output: str = ""
    made: dict[str, str] = field(default_factory=dict)
    where: dict[str, str] = field(default_factory=dict)  # file:line
    also: dict[str, tuple[str, ...]] = field(default_factory=dict)  # other places
    refused: dict[str, str] = field(default_factory=dict)
    proof: tuple[tuple[ProofStep, ...], ...] = ()  # a row a rank
    drifts: tuple[Drift, ...] = ()  # of all ranks' weights
    folder: Path | None = None

    @functools.cached_property
    def case(self) -> RankMetrics:
        """Its first rank, as the diagnosis sees it."""
        assert self.trace is not None
        return cases(self.trace)[0]

    @property
    def planned_samples(self) -> float | None:
        """Samples of the whole training, where the script read its number of epochs."""
        epochs = knobs(self.case.facts.settings, "epochs", lambda value: type(value) is int)
        return epochs[0].value * self.samples_an_epoch if epochs and self.samples_an_epoch else None

    @property
    def samples_an_epoch(self) -> float | None:
        """Of all ranks, by what a step was seen to take."""
        steps, seen = self.case.steps_an_epoch, self.case.breakdown
        if self.trace is None or not steps or not seen.samples:
            return None
        return steps * seen.samples / seen.steps * len(self.trace.ranks)

    def epoch_s(self, speed: Speed) -> float | None:
        """How long one pass over the data takes at a speed, pauses and all."""
        epoch = self.samples_an_epoch if speed.unit == "samples/s" else self.case.steps_an_epoch
        return epoch / speed.with_pauses if epoch else None

    @property
    def short_epoch(self) -> str:
        """What there is to mind where starting an epoch is a share worth telling, and was not seen."""
        steps, epoch_s = self.case.steps_an_epoch, self.epoch_s(self.speed) if self.speed is not None else None
        seen = self.speed is None or not steps or self.speed.steps >= steps
        if seen or epoch_s is None or epoch_s >= SHORT_EPOCH_S:
            return ""
        return f"an epoch takes {epoch_s:.0f} s now, and what its start costs may not be in these figures"

    def step_s_at(self, speed: Speed, changes: Sequence[Change]) -> float:
        """How long one of its steps with these changes too would take, were it that fast."""
        batch, seen = self.case.loader.batch_size, self.case.breakdown
        new: int | None = next((change.value for change in changes if change.name == "batch_size"), batch)
        each = (seen.samples or 0) / seen.steps if speed.unit == "samples/s" else 1.0
        return each / speed.value * (new / batch if new and batch else 1.0)

    def seen_like(self, earlier: Trace | None) -> Run:
        """It, with the X-ray and the ceiling of an earlier trace where it has none of its own."""
        seen = seen_like(self.trace, earlier) if self.trace is not None and earlier is not None else self.trace
        return replace(self, trace=seen)

    @property
    def in_company(self) -> bool:
        """Whether others used the machine meanwhile, so that it says less."""
        found = diagnose(self.trace) if self.trace is not None else ()
        return any(finding.code == "hardware.shared" for finding in found)

    @property
    def hung(self) -> bool:
        return self.code == launcher.TIMED_OUT

    @property
    def broke_off(self) -> bool:
        """Whether a proof's run has come to nothing, or not to the steps asked of it."""
        return self.hung or not self.proof or bool(self.code and min(map(len, self.proof)) < self.asked)

    def why_not_made(self, change: Change) -> str | None:
        """Why a change was refused; or why its knob had no effect."""
        if change.name in self.refused or not change.knob:
            return self.refused.get(change.name)
        return why_without_effect(change, self.case.facts)

    def unmeasured(self) -> str | None:
        """Why flatout is not in the command, where it said so."""
        if self.folder is None or not (output := self.folder / launcher.OUTPUT).is_file():
            return None
        with output.open(encoding="utf-8", errors="replace") as lines:
            found = (_UNMEASURED.match(line) for line in lines)
            return next((redact_text(match[1]) for match in found if match), None)

    def why_no_baseline(self, steps: int) -> str:
        """Why this run of the command as it is, which was to take so many steps, is nothing to begin from."""
        taken = self.case.breakdown.steps if self.trace is not None else 0
        if self.hung and (taken >= steps or self._stood_still_s > _STANDS_STILL_S):
            still = f" for {self._stood_still_s:.0f} s" if self._stood_still_s > _STANDS_STILL_S else ""
            hint = ": a worker, or another process that it waits for, may be stuck" if taken < steps else ""
            ended = f"and was ended after {self.seconds:.0f} s"
            return f"the command stood still{still} after {taken} training steps, {ended}{hint}"
        if self.hung:
            tried = f"{steps} training steps in {self.seconds:.0f} s"
            return f"the command did not come to {tried}: fewer may do (--steps 20), or more time (--budget)"
        if self.code != 0:
            unfed = "; a trial has nothing to read from stdin" if "EOFError" in self.output else ""
            return f"the command fails by itself: {self.reason()}{unfed}"
        if self.trace is None and (why := self.unmeasured()):
            return f"flatout could not look into the command: {why}"
        if self.trace is None:
            return "no optimizer step was seen: nothing to fix (does the command train, and with this Python?)"
        return "the command ended after a few steps: too few to measure"

    @property
    def _stood_still_s(self) -> float:
        """How long before its end no step has ended any more."""
        samples = [s.time_s for some in self.trace.samples.values() for s in some] if self.trace is not None else []
        steps = self.trace.ranks[0].steps if self.trace is not None else ()
        return max(samples) - max(step.start_s + step.wall_ms / 1e3 for step in steps) if samples and steps else 0.0

    def reason(self) -> str:
        """Why it ended as it did, in its own words where it left some."""
        if self.hung:
            return f"it did not come to its end and was ended after {self.seconds:.0f} s"
        if _NO_MEMORY.search(self.output):
            return "the card is out of memory"
        lines = self.output.strip().splitlines()
        said = next((line for line in reversed(lines) if _ERROR.match(line)), lines[-1] if lines else "no output")
        places = [m for m in _FRAME.finditer(self.output) if "-packages" not in m[1] and "/flatout/" not in m[1]]
        where = f" at {Path(places[-1][1]).name}:{places[-1][2]}" if places else ""
        return f"exit code {self.code}: {said.strip()[:160]}{where}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofRun:
    """A run for a proof: with these changes, so many steps. Those that lead have a number; who follows one of them goes
    on from its weights every few steps."""

    changes: tuple[Change, ...]
    steps: int
    leads: int = 0
    follows: int = 0


class Runner(Protocol):
    """Runs the command with these changes."""

    def __call__(
        self,
        changes: Sequence[Change],
        *,
        steps: int,
        timeout_s: float,
        at_least_s: float = 0.0,
        known_to: float = math.inf,
        look_below_s: float | None = None,
    ) -> Run:
        """One run of so many steps, or more where they take less than so long.

        It goes on for up to twice as long while its mean step is not `known_to` such a share.
        The X-ray and the ceiling follow only where a step takes less than `look_below_s`.
        """
        ...

    def prove(self, wanted: Sequence[ProofRun], *, timeout_s: float, at_once: int = 1) -> list[Run]:
        """Runs for a proof, with fingerprints, so many at once: nobody times them. Who leads comes first."""
        ...


class Launcher:
    """The real runner: each run is a trial of `launch`, in a folder of its own, and writes nothing of the user's: on an
    `overlay` or by redirection; where that is not said, as the system permits.

    Raises OverlayError where a run fails because of its overlay, and RealWriteError where one has written all the same.
    """

    def __init__(self, command: Sequence[str], folder: Path, *, overlay: bool | None = None) -> None:
        self._command = list(command)
        self._folder = folder
        self._overlay = overlay
        self._numbers = itertools.count(1)

    def __call__(
        self,
        changes: Sequence[Change],
        *,
        steps: int,
        timeout_s: float,
        at_least_s: float = 0.0,
        known_to: float = math.inf,
        look_below_s: float | None = None,
    ) -> Run:
        for weights in self._folder.glob("weights-*"):  # a proof is over
            shutil.rmtree(weights, ignore_errors=True)
        trial = Trial(
            seed=SEED, at_least_s=at_least_s, known_to=known_to, look_below_s=look_below_s, timeout_s=timeout_s
        )
        return self._run(changes, steps, trial)

    def _run(self, changes: Sequence[Change], steps: int, trial: Trial) -> Run:
        folder = self._folder / f"{next(self._numbers):02d}"
        plan, start_s = Plan(changes=tuple(changes)), time.monotonic()
        self._folder.mkdir(exist_ok=True)
        if self._overlay is None:
            self._overlay = not sandbox.why_no_overlay(self._command, self._folder)
        with tempfile.TemporaryDirectory(prefix="scratch-", dir=self._folder, ignore_cleanup_errors=True) as scratch:
            trial, xray = replace(trial, protect=Path(scratch), overlay=self._overlay), not trial.fingerprints
            code = launcher.run(self._command, folder=folder, max_steps=steps, xray=xray, plan=plan, trial=trial)
        run = recorded(tuple(changes), code, time.monotonic() - start_s, folder, asked=steps)
        self._complain_of_the_overlay(run, first=folder.name == "01")
        return run

    def _complain_of_the_overlay(self, run: Run, *, first: bool) -> None:
        """Of a disk that takes none; and of others' files that could not be copied into it: where the run says so, or
        may not have said why it failed (torch.save does not) and has never worked yet."""
        if run.code in (0, launcher.TIMED_OUT) or not self._overlay:
            return
        if _READ_ONLY.search(run.output):
            raise OverlayError(f"a disk that takes none can only be read: {run.reason()}")
        said = _NOT_COPIED.search(run.output)
        if sandbox.may_mount() or not (said or first):
            return
        theirs = sandbox.of_others(self._command)
        why = f"{theirs or 'what it writes to'} belongs to another user or group, and without root it cannot hold that"
        if said:
            raise OverlayError(why)
        if theirs:
            raise OverlayError(f"{why}, which may be why the command fails: {run.reason()}")

    def _prove(self, wanted: ProofRun, timeout_s: float) -> Run:
        leads, follows = self._weights(wanted.leads), self._weights(wanted.follows)
        trial = Trial(seed=SEED, fingerprints=True, leads=leads, follows=follows, timeout_s=timeout_s)
        if leads is not None:
            affordable = min(WEIGHTS_BYTES, int(_WEIGHTS_SHARE * shutil.disk_usage(leads).free))
            trial = replace(trial, weights_bytes=affordable)
        try:
            return self._run(wanted.changes, wanted.steps, trial)
        finally:
            if leads is not None:
                (leads / WEIGHTS_OVER).touch()  # whoever waits for more, waits in vain

    def _weights(self, leader: int) -> Path | None:
        if not leader:
            return None
        folder = self._folder.absolute() / f"weights-{leader}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def prove(self, wanted: Sequence[ProofRun], *, timeout_s: float, at_once: int = 1) -> list[Run]:
        if len(wanted) == 1:
            return [self._prove(wanted[0], timeout_s)]
        under_way: set[int] = set()
        over = threading.Event()

        def start(one: ProofRun) -> Run | None:
            me = threading.get_ident()
            under_way.add(me)
            try:
                return self._prove(one, timeout_s) if not over.is_set() else None
            finally:
                under_way.discard(me)

        with ThreadPoolExecutor(at_once) as pool, _heard_as_ctrl_c():
            try:
                runs = [pool.submit(start, one) for one in wanted]
                while not all(run.done() for run in runs):
                    wait(runs, timeout=0.2)  # and no longer: a signal is heard in between
                    for run in runs:
                        if run.done():
                            run.result()  # raises what it has raised
            except BaseException:
                over.set()  # whichever of them has not begun does not
                while under_way:
                    for folder in self._folder.iterdir():  # one may only be starting: then the next round ends it
                        launcher.end(folder)
                    time.sleep(0.2)
                raise
            return [run for run in (run.result() for run in runs) if run is not None]


@contextlib.contextmanager
def _heard_as_ctrl_c() -> Iterator[None]:
    """What would end us, and leave our trials behind, interrupts."""
    signals = (signal.SIGTERM, signal.SIGHUP) if threading.current_thread() is threading.main_thread() else ()
    before = [(number, signal.getsignal(number)) for number in signals]
    before = [(number, handler) for number, handler in before if handler not in (signal.SIG_IGN, None)]
    try:
        for number, _ in before:
            signal.signal(number, signal.default_int_handler)
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def recorded(changes: tuple[Change, ...], code: int, seconds: float, folder: Path, *, asked: int = 0) -> Run:
    """A run from what it left in its folder."""
    try:
        trace: Trace | None = read(folder)
    except TraceError:
        trace = None
    if trace is not None and not trace.ranks:
        trace = None
    entries = trace.ranks[0].facts.changes if trace is not None else ()
    return Run(
        changes=changes,
        code=code,
        seconds=seconds,
        asked=asked,
        trace=trace,
        speed=measure(trace) if trace is not None else None,
        output=end_of(folder / launcher.OUTPUT),
        made={entry.name: entry.how for entry in entries if entry.applied},
        where={entry.name: entry.where for entry in entries if entry.applied and entry.where},
        also={entry.name: entry.also for entry in entries},
        refused={entry.name: entry.how or "no reason given" for entry in entries if not entry.applied},
        proof=tuple(_proof(path) for path in sorted(folder.glob("proof-*.jsonl"))),
        drifts=tuple(Drift(**drift) for path in sorted(folder.glob("drifts-*.json")) for drift in _list(path)),
        folder=folder,
    )


def seen_like(trace: Trace, earlier: Trace) -> Trace:
    """The trace, with the X-ray and the ceiling of an earlier one where it has none of its own."""
    ranks = []
    for rank, before in zip(trace.ranks, earlier.ranks, strict=False):
        measured = any(step.kind in CEILING for step in rank.steps)
        ceiling = () if measured else tuple(step for step in before.steps if step.kind in CEILING)
        ranks.append(replace(rank, xray=rank.xray or before.xray, steps=(*rank.steps, *ceiling)))
    return replace(trace, ranks=(*ranks, *trace.ranks[len(ranks) :]))


def end_of(output: Path, most: int = _TAIL_BYTES) -> str:
    """The last lines of what a command has printed, without secrets."""
    try:
        with output.open("rb") as file:
            before = max(0, file.seek(0, 2) - most)
            file.seek(before)
            printed = file.read().decode(errors="replace")
    except OSError:
        return ""
    whole = _LINE_ENDS.search(printed) if before else None  # a line cut short may hold half a secret
    return redact_text(printed[whole.end() :] if whole is not None else printed)


def _list(path: Path) -> list[dict[str, Any]]:
    try:
        found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return []  # cut off
    return found


def _proof(path: Path) -> tuple[ProofStep, ...]:
    steps = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            data = json.loads(line)
        except ValueError:
            break  # cut off in mid-line
        steps.append(
            ProofStep(
                inputs=tuple(data.get("inputs") or ()),
                indices=tuple(tuple(batch) for batch in data.get("indices") or ()),
                begins=tuple(data.get("begins") or ()),
                loss=data.get("loss"),
                losses=tuple(data.get("losses") or ()),
                moved=WeightMove(*data["moved"]) if data.get("moved") else None,
            )
        )
    return tuple(steps)
