"""One training process being recorded: Recorder, Timing and TraceWriter, tied together.

Nothing is written before the first optimizer step, so a process that never trains leaves no file. Whatever goes wrong
here is said once, switched off, and the user's run goes on.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import os
import socket
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.data.dataloader as torch_loader

from flatout.feed.watch import Filling, Watch
from flatout.inside import facts as look
from flatout.inside.calls import called_from, raised_at
from flatout.inside.ceiling import Ceiling
from flatout.inside.changes.ledger import Ledger
from flatout.inside.clock import CudaClock, Leash, LossReader
from flatout.inside.imports import when_imported
from flatout.inside.loader_workers import Meters
from flatout.inside.patches import Patches
from flatout.inside.recorder import DATA, HELD, OWN, Recorder
from flatout.inside.root_modules import RootModules
from flatout.inside.settings import Settings
from flatout.inside.timing import LIBRARIES, Timing
from flatout.inside.trial_progress import TrialProgress
from flatout.inside.xray import Profiler, read_kernels
from flatout.launch.protocol import RANK, Options
from flatout.model.errors import FlatoutError, TraceError
from flatout.model.facts import GradientExchange, LoaderFacts, OptimizerFacts, OwnCost
from flatout.redact import redact_command, redact_text
from flatout.trace import End, FactsRecord, Note, RunInfo, Step, TraceWriter
from flatout.trace.light_steps import LightSteps

if TYPE_CHECKING:
    from flatout.inside.changes.applied import Applied

_WATCHED_FOR = 200  # batches
_FIRST_FACTS_AT_STEP = 3
_LOOK_EVERY_STEPS = 16
_FACTS_EVERY_TIMES = 10
_RECORDINGS = 1000
_XRAY_STEPS = 9  # the first bears the profiler's start and is left out
_XRAY_AFTER_STEPS = 12
_XRAY_AFTER_S = 2.0
_RECOVERY_STEPS = 12
_AHEAD, _AHEAD_OF_CEILING = 8, 2  # steps, of a run with an end
_GRACE_S = 5.0  # for a script that swallows SystemExit, or saves what it has on its way out


class Process:
    """What there is once in a process: the patches, the modules, a plan's changes, and the recording."""

    def __init__(self) -> None:
        self.patches = Patches()
        self.roots = RootModules(self.patches)
        self.meters = Meters(self.patches, self._stand_aside)
        self.applied: Applied | None = None
        self.recording: Recording | None = None
        self._begun = False

    def begin(self, options: Options, settings: Settings, ledger: Ledger | None = None) -> Recording:
        """Make a plan's changes and start recording; `ledger` has changes that are made already."""
        self.meters.start(options.folder)
        if self.applied is None and (options.plan is not None or options.trial is not None):
            from flatout.inside.changes.applied import Applied  # seldom needed, and not small

            ranks = lambda: (_rank(), _world_size())  # noqa: E731
            self.applied = Applied(options, ledger or Ledger(), ranks, self.patches, self.roots)
        if self.recording is None or self.recording.closed:
            self.recording = Recording(self, options, settings)
        if not self._begun:
            self._begun = True
            os.register_at_fork(after_in_child=self._start_over_in_child)
        return self.recording

    def _stand_aside(self) -> None:
        """This process turns out to be a loader worker: it never trains."""
        if self.recording is not None:
            self.recording.abandon()

    def _start_over_in_child(self) -> None:
        """In a forked child nothing is written for the parent. A child that trains gets a recording of its own."""
        recording = self.recording
        if recording is None or recording.closed:
            return
        recording.abandon()
        self.recording = None
        self.meters.clear()
        if not called_from(torch_loader.__file__):  # a loader is starting a worker: it never trains
            self.begin(recording.options, recording.settings)


process = Process()


class Recording:
    """What goes on in one training process."""

    def __init__(self, process: Process, options: Options, settings: Settings) -> None:
        self._process = process
        self.options = options
        self.settings = settings
        self._writer: TraceWriter | None = None
        self._losses = LossReader()
        gpu = CudaClock() if torch.version.cuda is not None else None
        self._began_s = time.monotonic()
        self._recorder = Recorder(clock=time.monotonic, emit=self._emit, gpu=gpu, losses=self._losses)
        self._timing = Timing(process.patches, process.roots, self._recorder, self, self._fail)
        self.next_look = 0  # the step after which `step_ended` is to be called next
        self._loaders: dict[int, LoaderFacts] = {}
        self._passes: Counter[int] = Counter()
        self.watched: dict[int, Watch] = {}  # datasets that the training process reads itself
        self._writes: dict[int, str] = {}  # what its loop was seen to write to in them
        self._filling: dict[int, tuple[Filling, int]] = {}  # and how many samples a batch has
        self._fills: dict[int, str] = {}  # what samples were seen to fill in them
        self._autocast: set[str] = set()
        self._exchange: GradientExchange | None = None
        self._xray = _XrayPlan(options)
        measures_ceiling = options.trial is None or not options.trial.fingerprints
        self._ceiling = Ceiling() if options.max_steps is not None and measures_ceiling else None
        self.replays = self._ceiling is not None
        if self._ceiling is not None:
            self._ceiling.install(process.patches, self._timing.fail)
        self._leash = Leash(_AHEAD)
        self._early: list[Step | LightSteps] = []
        self._first_step_s: float | None = None
        self._course = TrialProgress(options, alone=lambda: _world_size() == 1)
        self._last_optimizer: Callable[[], Any] = lambda: None  # its parameters may be many: they are not held here
        self._optimizer_facts = OptimizerFacts()
        self._facts_at_step = _FIRST_FACTS_AT_STEP
        self.closed = False
        self._timing.install()
        for library in LIBRARIES:
            when_imported(library, lambda module: self._timing.after_import(module.__name__))
        atexit.register(self._close_at_exit)

    # -- what the wrappers tell ----------------------------------------------------------------------------------

    def loader_seen(self, number: int, loader: Any) -> None:
        os.environ[RANK] = str(_rank())  # its workers write beside the rank they belong to
        by_trainer = "transformers.trainer" in sys.modules and called_from("/transformers/trainer.py")
        self._loaders[number] = dataclasses.replace(look.loader_facts(loader), by_trainer=by_trainer)
        self._passes[number] += 1
        if loader.num_workers == 0 and self._passes[number] == 1:
            samples = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
            self.watched[number] = Watch(loader.dataset, loader.collate_fn)
            if isinstance(samples, int) or loader.batch_sampler is None:
                self._filling[number] = Filling(loader.dataset), samples or 1
            for held in (self.watched, self._filling):
                weakref.finalize(loader, held.pop, number, None).atexit = False

    def fetches(self, loader: int) -> None:
        watch = self.watched.get(loader)
        written = watch.changed() if watch is not None else None
        if written:
            self._writes[loader] = written
        if watch is not None and (written or watch.looked >= _WATCHED_FOR):
            self.watched.pop(loader, None)

    def has_fetched(self, loader: int) -> None:
        watch, (filling, samples) = self.watched.get(loader), self._filling.get(loader, (None, 0))
        if watch is not None:
            watch.renew()  # what samples leave behind is not the loop's doing
        filled = filling.after_batch(samples) if filling is not None else None
        if filled:
            self._fills[loader] = filled

    def fetched(self, loader: int, batch: Any) -> None:
        if self._ceiling is not None:
            self._ceiling.keep(loader, batch)

    def replayed_batch(self, loader: int) -> Any:
        if self._ceiling is None or loader not in self._recorder.train_loaders:
            return None
        return self._ceiling.batch(loader)

    def autocast_entered(self, dtype: str) -> None:
        self._autocast.add(dtype)

    def backward_begins(self, tensors: Any) -> None:
        first = tensors[0] if isinstance(tensors, list | tuple) and tensors else tensors
        wanted = self._recorder.marking or not getattr(first, "is_cuda", False)
        self._recorder.backward(self._losses.take(first) if wanted else None)

    def step_ended(self, optimizer: Any) -> None:
        """A training step is over: the few things that happen once, each at its step, and afterwards a rare look."""
        steps = self._recorder.steps
        self._last_optimizer = weakref.ref(optimizer)
        if self.options.max_steps is not None:
            self._stay_close()
        self._course.step_ended(self._recorder.measured)
        if self._writer is None:
            self._first_step_s = time.monotonic()
            self._as_ours(self._open_trace)
        elif self._writer.error is not None:
            raise TraceError(self._writer.error)
        if steps >= self._facts_at_step:
            self._facts_at_step *= _FACTS_EVERY_TIMES
            self._as_ours(self._write_facts)
        awaits_xray = not self._xray.done and torch.cuda.is_initialized()
        if awaits_xray and self.options.max_steps is None:
            self._xray.step_ended(self)
        changing = self._process.applied is not None and self._process.applied.wants_every_step
        every_step = awaits_xray or changing or self.options.max_steps is not None
        self.next_look = steps + (1 if every_step else _LOOK_EVERY_STEPS)
        if self._process.applied is not None:
            first = self._writer is not None and self._writer.path.parent == self.options.folder
            self._as_ours(functools.partial(self._process.applied.step_ended, first=first))
        if self.options.max_steps is not None:
            self._end_in_time()
        self._course.step_begins()

    def _as_ours(self, action: Callable[[], None]) -> None:
        """Do something whose time is on our account."""
        self._recorder.push(OWN)
        try:
            action()
        finally:
            self._recorder.pop()

    # -- a run with an end: so many steps, then the X-ray, then the ceiling, then out ---------------------------------

    def _end_in_time(self) -> None:
        if self._course.warms_up(self._recorder.steps, self._batches_ready()):
            self._recorder.set_kind("warmup")
            return
        if not self._course.is_over():
            return
        if self._course.worth_a_look:
            if not self._xray.done and torch.cuda.is_initialized():
                taking = self._xray.running
                self._xray.step_ended(self)
                if taking or self._xray.running:
                    return
            kind = self._ceiling.next_step() if self._ceiling is not None else None
            if self._ceiling is not None:
                self._ceiling.resident = kind == "resident"
            self._leash.steps = _AHEAD_OF_CEILING
            if kind is not None:
                self._recorder.set_kind(kind)
                return
        self.close()
        if self.options.trial is not None:
            sys.stdout.flush()
            os._exit(0)  # a script that catches SystemExit would go on to its checkpoint
        threading.Thread(target=_exit_after_grace, name="flatout-grace", daemon=True).start()
        raise SystemExit(0)

    def _stay_close(self) -> None:
        """What is to be measured is the card's pace, where that is the slower one."""
        due = self._leash.step_ended()
        if due is not None:
            self._recorder.push(HELD)
            self._leash.wait(due)
            self._recorder.pop()

    def _batches_ready(self) -> int:
        """What lies ready at the start where workers had time to load."""
        known = [self._loaders[number] for number in self._recorder.train_loaders if number in self._loaders]
        return max((look.batches_ahead(facts) for facts in known), default=0)

    # -- writing ----------------------------------------------------------------------------------------------------

    def _open_trace(self) -> None:
        info = RunInfo(
            name=self.options.name,
            command=redact_command(sys.orig_argv),
            host=socket.gethostname(),
            rank=_rank(),
            world_size=_world_size(),
            pid=os.getpid(),
            started_unix_s=time.time() - (time.monotonic() - self._began_s),
            started_s=self._began_s,
        )
        self._writer = _first_free(self.options.folder, info)
        self._look_at_optimizer()
        for step in self._early:
            self._writer.write(step)
        self._early.clear()

    def _emit(self, step: Step | LightSteps) -> None:
        if self._writer is None:
            self._early.append(step)
        else:
            self._writer.write(step)
        if not self._xray.done:
            self._xray.emitted(step)

    def _write_facts(self) -> None:
        if self._writer is None:
            return
        self.settings.note_config_modules()
        self._exchange = look.gradient_exchange(self._process.roots.made) or self._exchange  # the model may be gone
        self._look_at_optimizer()
        facts = dataclasses.replace(
            look.in_force(self._optimizer_facts),
            loaders=self._kinds_of_loaders(),
            loaders_side_by_side=self._recorder.loaders_side_by_side,
            autocast=tuple(sorted(self._autocast)) or ("None",),
            gradient_exchange=self._exchange,
            settings=tuple(self.settings.read),
            own_cost=self._own_cost(),
        )
        applied = self._process.applied
        if applied is not None and applied.ledger.changes:
            facts = dataclasses.replace(facts, changes=applied.ledger.entries(), compile_s=applied.compile_s)
        self._writer.write(FactsRecord(time_s=time.monotonic(), values=facts))

    def _look_at_optimizer(self) -> None:
        optimizer = self._last_optimizer()
        if optimizer is not None:  # the function that trained may have returned
            self._optimizer_facts = look.optimizer_facts(optimizer)

    def _kinds_of_loaders(self) -> tuple[LoaderFacts, ...]:
        """One of those that are alike."""
        alike: dict[str, list[int]] = {}
        for number, facts in self._loaders.items():
            alike.setdefault(str(facts), []).append(number)
        return tuple(
            dataclasses.replace(
                self._loaders[numbers[0]],
                trains=any(number in self._recorder.train_loaders for number in numbers),
                made_anew=len(numbers) > 1 == max(self._passes[number] for number in numbers),
                written=next((self._writes[number] for number in numbers if number in self._writes), None),
                fills=next((self._fills[number] for number in numbers if number in self._fills), None),
            )
            for numbers in alike.values()
        )

    def _note_changes_not_made(self) -> None:
        for entry in self._process.applied.ledger.entries() if self._process.applied is not None else ():
            if not entry.applied:
                self.note(f"{entry.name} was not changed: {entry.how}")

    def _own_cost(self) -> OwnCost:
        """What measuring has cost so far: the recorder's time, and its writer's on a thread of its own."""
        steps = max(1, self._recorder.steps)
        measuring_us = self._recorder.own_s / steps * 1e6
        writing_us = (self._writer.busy_s if self._writer is not None else 0.0) / steps * 1e6
        return OwnCost(us_per_step=measuring_us + writing_us, measuring_us=measuring_us, writing_us=writing_us)

    def note(self, text: str) -> None:
        """Leave a word in the trace."""
        if self._writer is not None:
            self._writer.write(Note(time_s=time.monotonic(), text=text))

    def write(self, record: Any) -> None:
        """Put one more record into the trace."""
        if self._writer is not None:
            self._writer.write(record)

    def _close_at_exit(self) -> None:
        """Python itself keeps the exception that ended a script; in a notebook it may be one of hours ago."""
        raised = None if "ipykernel" in sys.modules else getattr(sys, "last_value", None)
        self.close(raised)

    def close(self, raised: BaseException | None = None) -> None:
        """Close the books, for good or because of what was `raised`; safe to call twice and from a forked child."""
        if self.closed:
            return
        self.closed = True
        try:
            if self._writer is not None:
                self._recorder.finish()
                self._xray.finish(self)
                if self._process.applied is not None:
                    self._process.applied.finish(self._writer.path.with_name(f"proof-{_rank():05d}.jsonl"))
                self._write_facts()
                self._note_changes_not_made()
            self._process.meters.finish()
        except Exception as problem:
            self._timing.fail(problem)
        finally:
            self._take_off()
            os.environ.pop(RANK, None)
            atexit.unregister(self._close_at_exit)
            if self._writer is not None:
                self._leave_the_end(self._writer, raised)
                self._writer.close()

    def _leave_the_end(self, writer: TraceWriter, raised: BaseException | None) -> None:
        try:
            writer.write(_end(raised))
        except Exception as problem:
            self._timing.fail(problem)

    def _fail(self, problem: BaseException) -> None:
        what = str(problem) if isinstance(problem, FlatoutError) else f"{type(problem).__name__}: {problem}"
        text = f"flatout stopped measuring: {redact_text(what)}; training goes on"
        print(text, file=sys.stderr)
        self.note(text)

    def abandon(self) -> None:
        """Take everything off and write nothing more: this is another process than the one that was recorded."""
        self.closed = True
        self._take_off()

    def _take_off(self) -> None:
        self._timing.remove()
        if self._ceiling is not None:
            self._ceiling.remove()


class _XrayPlan:
    """When the X-ray is taken: once, when the run is warm; then the step time is checked to have recovered."""

    def __init__(self, options: Options) -> None:
        self.done = not options.xray
        self.running = False
        at_the_end = options.max_steps is not None
        self._after_steps, self._after_s = (0, 0.0) if at_the_end else (_XRAY_AFTER_STEPS, _XRAY_AFTER_S)
        self._profiler = Profiler()
        self._left = _XRAY_STEPS
        self._results: Any = None
        self._steps: list[Step] = []
        self._before_ms: list[float] = []
        self._after_ms: list[float] = []

    def step_ended(self, recording: Recording) -> None:
        """Take it when its time has come. What goes wrong with it costs the X-ray, and nothing else."""
        try:
            self._step_ended(recording)
        except Exception as problem:
            self.done, self.running = True, False
            recording.note(f"no X-ray was taken ({type(problem).__name__}: {problem})")

    def _step_ended(self, recording: Recording) -> None:
        recorder = recording._recorder
        if self.running:
            self._left -= 1
            if self._left and self._profiler.running:
                recorder.set_kind("xray")
                return
            recording._as_ours(self._stop)
            recorder.set_kind("after xray")
        elif self._results is None:
            warm_s = time.monotonic() - (recording._first_step_s or 0.0)
            if recorder.measured >= self._after_steps and warm_s >= self._after_s and self._profiler.available():
                recording._as_ours(self._profiler.start)
                recorder.set_kind("xray")
                self.running = True
        elif len(self._after_ms) >= _RECOVERY_STEPS and len(self._steps) >= _XRAY_STEPS:
            self.done = True
            recorder.set_kind("after xray")
            recording._as_ours(
                functools.partial(self._read, recording)
            )  # a thread would take the trainer's time unseen

    def _stop(self) -> None:
        self.running = False
        self._results = self._profiler.stop()

    def emitted(self, step: Step | LightSteps) -> None:
        if isinstance(step, Step) and step.kind == "xray":
            self._steps.append(step)
            return
        walls = self._after_ms if self._results is not None else self._before_ms
        for one in (step,) if isinstance(step, Step) else step.last(_RECOVERY_STEPS):
            if one.kind == "train":  # data has its moods
                walls.append(sum(span.host_ms for span in one.spans if span.name not in (DATA, OWN)))
        del walls[: -4 * _RECOVERY_STEPS]

    def finish(self, recording: Recording) -> None:
        """The run ends: read what there is, if that has not been done."""
        if self.running:
            self._stop()
        if self._results is not None and not self.done:
            self.done = True
            self._read(recording)

    def _read(self, recording: Recording) -> None:
        try:
            xray = read_kernels(self._profiler.kernels(self._results), self._steps[1:])
            if xray is not None:
                recording.write(xray.with_recovery(self._recovered()))
        except Exception as problem:
            recording.note(f"the X-ray could not be read ({type(problem).__name__}: {problem})")

    def _recovered(self) -> bool | None:
        if len(self._before_ms) < 4 or len(self._after_ms) < 4:
            return None
        before, after = (sorted(ms)[len(ms) // 2] for ms in (self._before_ms[-_RECOVERY_STEPS:], self._after_ms))
        return after <= 1.1 * before + 0.1


def _end(raised: BaseException | None) -> End:
    """What an exception says may be secret: its type and its place are enough."""
    if raised is None:
        return End(time_s=time.monotonic())
    return End(time_s=time.monotonic(), error=type(raised).__name__, where=raised_at(raised.__traceback__))


def _rank() -> int:
    """This process among those that train together. A launcher says so by the environment, or else torch knows."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) or 0)


def _world_size() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", os.environ.get("SLURM_NTASKS", "1")) or 1)


def _first_free(folder: Path, info: RunInfo) -> TraceWriter:
    """A writer into `folder`; into folder-2, folder-3 … where the command trains more than once."""
    for path in (folder, *(folder.with_name(f"{folder.name}-{n}") for n in range(2, _RECORDINGS))):
        if not (path / f"rank-{info.rank:05d}.jsonl").exists():
            return TraceWriter(path, info)
    raise TraceError(f"{folder} has been recorded into {_RECORDINGS} times")


def _exit_after_grace() -> None:
    time.sleep(_GRACE_S)
    os._exit(0)
