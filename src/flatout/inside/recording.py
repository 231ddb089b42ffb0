"""One training process being recorded: what is measured, and the trace it is written to.

Nothing is written before the first optimizer step: a process that never trains leaves no file.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.utils.data.dataloader as torch_loader

from flatout.inside import run_facts
from flatout.inside.changes.ledger import Ledger
from flatout.inside.loaders import LoaderNotes, Meters
from flatout.inside.patches import Patches, Stage
from flatout.inside.recorder import Recorder, Sampling
from flatout.inside.root_modules import RootModules
from flatout.inside.stacks import StackSampler, called_from, in_words, raised_at
from flatout.inside.timing import CudaClock, LossReader, Timing
from flatout.launch.protocol import RANK, Options, answer, in_kernel, is_asked
from flatout.model.errors import FlatoutError, TraceError
from flatout.model.records import GradientExchange, OwnCost, ParallelFacts
from flatout.redact import redact_text
from flatout.trace import End, FactsRecord, Note, RunInfo, Step, TraceWriter
from flatout.trace.downsample import LightSteps

if TYPE_CHECKING:
    from flatout.feed.scheduler import BatchScheduler
    from flatout.inside.changes.applied import Applied
    from flatout.inside.start import Settings
    from flatout.inside.trial import BoundedRun, Ceiling
    from flatout.inside.tune import Tuner
    from flatout.inside.xray import XraySchedule

_FIRST_FACTS_AT_STEP, _FACTS_EVERY_TIMES = 3, 10
_LOOK_EVERY_STEPS = 16
_STARTS_WORKERS = (torch_loader.__file__, "flatout/feed/fork_server.py")
_RECORDINGS = 1000
_GRACE_S = 5.0  # for a script that swallows SystemExit, or saves what it has on its way out


class Process:
    """What there is once in a process: the patches, the modules, a plan's changes, and the recording."""

    def __init__(self) -> None:
        self.patches = Patches()
        self.roots = RootModules()
        self.meters = Meters(self.patches, self._stand_aside)
        self.applied: Applied | None = None
        self.recording: Recording | None = None
        self._follows_forks = False
        self._paused: StackSampler | None = None

    def begin(
        self, options: Options, settings: Settings, ledger: Ledger | None = None, sampling: Sampling | None = None
    ) -> Recording:
        """Make a plan's changes and start recording; `ledger` has changes that are made already."""
        self.meters.start(options.folder)
        self.make_changes(options, ledger or Ledger())
        if self.recording is None or self.recording.closed:
            self.recording = Recording(self, options, settings, sampling)
        if not self._follows_forks:
            self._follows_forks = True
            os.register_at_fork(
                before=self._before_fork, after_in_parent=self._after_fork, after_in_child=self._start_over_in_child
            )
        return self.recording

    def make_changes(self, options: Options, ledger: Ledger) -> Applied | None:
        """Have the changes in the ledger made from now on, and what a trial imposes; None where there
        is nothing."""
        if self.applied is None and (ledger.changes or options.trial is not None):
            from flatout.inside.changes.applied import Applied  # seldom needed, and not small

            self.applied = Applied(options, ledger, run_facts.ranks, self.patches, self.roots)
        return self.applied

    def _stand_aside(self) -> None:
        """This process turns out to be a loader worker: it never trains."""
        if self.recording is not None:
            self.recording.abandon()

    def _before_fork(self) -> None:
        """A thread at work while its process forks may leave a lock held in the child."""
        self._paused = None
        if self.recording is not None and self.recording.stacks.running:
            self._paused = self.recording.stacks
            self._paused.stop()

    def _after_fork(self) -> None:
        if self._paused is not None:
            with contextlib.suppress(RuntimeError):  # a limit on threads: lines are no longer looked at
                self._paused.start()

    def _start_over_in_child(self) -> None:
        """In a forked child nothing is written for the parent. A child that trains gets a recording
        of its own."""
        recording = self.recording
        if recording is None or recording.closed:
            return
        recording.abandon()
        self.recording = None
        self.meters.clear()
        if not any(map(called_from, _STARTS_WORKERS)):  # a loader is starting a worker: it never trains
            self.recording = Recording(self, recording.options, recording.settings, forked=True)


process = Process()


class Recording:
    """What goes on in one training process."""

    def __init__(
        self,
        process: Process,
        options: Options,
        settings: Settings,
        sampling: Sampling | None = None,
        *,
        forked: bool = False,  # most of such processes never train
    ) -> None:
        self._process = process
        self.options = options
        self.settings = settings
        self.closed = False
        self.next_look = 0  # the step after which `step_ended` is to be called next
        self.loaders = LoaderNotes()
        self._loaders_by_number: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.autocast: set[str] = set()  # the types of mixed precision that were seen
        self._writer: TraceWriter | None = None
        self._early: list[Step | LightSteps] = []
        self._began_s = time.monotonic()
        with_cuda = torch.version.cuda is not None
        gpu = CudaClock() if with_cuda else None
        self.recorder = Recorder(clock=time.monotonic, emit=self._emit, gpu=gpu, losses=LossReader(), sampling=sampling)
        self._exchange: GradientExchange | None = None
        self._parallel: ParallelFacts | None = None
        self._last_optimizer: Callable[[], Any] = lambda: None  # weak: its parameters may be many
        self._optimizer_facts: dict[str, Any] = {}
        self._facts_at_step = _FIRST_FACTS_AT_STEP
        self._xray: XraySchedule | None = None
        self._bounded: BoundedRun | None = None
        self._tuner: Tuner | None = None
        self.ceiling: Ceiling | None = None
        bounded = options.max_steps is not None
        if options.xray and with_cuda:
            from flatout.inside.xray import XraySchedule

            self._xray = XraySchedule(self.recorder, self._write, self.note, at_the_end=bounded)
        self._time = process.patches.subscriber(Stage.TIME, self._fail)
        Timing(self._time, process.roots, self.recorder, self).install()
        self.attention = run_facts.AttentionWatch(process.patches)
        self._time.on_leaving(self.attention.leave)
        self.flops = run_facts.FlopWatch(process.roots)
        self._time.on_leaving(self.flops.leave)
        if options.trial is not None:  # the changes that it tries may compile
            self.attention.leave()
            self.flops.leave()
        if bounded:
            self._bound()
        if options.tune and process.applied is not None:
            from flatout.inside.tune import Tuner

            self._tuner = Tuner(process.applied, self)
        self.stacks = StackSampler(
            lambda: self.recorder.thread,
            lambda: self.recorder.phase,
            sparse_phase="setup",
            steps=lambda: self.recorder.steps,
            now_and_then=self._now_and_then,
        )
        self._answered = options.trial is not None  # which nobody watches
        if not forked:
            self.stacks.start()
        atexit.register(self._close_at_exit)

    def _bound(self) -> None:
        """This run has an end, and may have a ceiling to measure."""
        from flatout.inside.trial import BoundedRun

        self._bounded = BoundedRun(self.options, self.recorder, self._xray, self._process.applied)
        self.ceiling = self._bounded.ceiling
        if self.ceiling is not None:
            changes = self._process.patches.subscriber(Stage.CHANGE, self._time.failed)
            self.ceiling.install(changes)
            self._time.on_leaving(changes.leave)

    def feeds_in_use(self) -> list[BatchScheduler]:
        """What makes the batches of the loaders that training reads from at present, where that is
        flatout's."""
        from flatout.feed.loader import feed_of

        loaders = (self._loaders_by_number.get(number) for number in sorted(self.recorder.train_loaders))
        feeds = (feed_of(loader) for loader in loaders if loader is not None)
        return [feed for feed in feeds if feed is not None and feed.in_pass]

    @property
    def folder(self) -> Path:
        """Where it is written, or would be."""
        return self._writer.path.parent if self._writer is not None else self.options.folder

    # -- what Timing tells

    def loader_seen(self, number: int, loader: Any) -> None:
        """A loader is about to begin a pass, and perhaps to start its workers."""
        run_facts.warn_of_workers(loader)
        self._loaders_by_number[number] = loader
        os.environ[RANK] = str(run_facts.ranks()[0])  # its workers write beside the rank they belong to
        self.loaders.pass_begins(number, loader)

    def step_ended(self, optimizer: Any) -> None:
        """A training step is over: things that happen once, each at its step, and then a rare look."""
        self._last_optimizer = weakref.ref(optimizer)
        recorder, bounded, applied, xray = self.recorder, self._bounded, self._process.applied, self._xray
        if bounded is not None:
            bounded.step_ended()
        self.attention.step_ended()
        if self.flops.step_ended():
            recorder.set_kind("warmup")
        if self._writer is None:
            recorder.as_own(self._open_trace)
        elif self._writer.error is not None:
            raise TraceError(self._writer.error)
        if recorder.steps >= self._facts_at_step:
            self._facts_at_step *= _FACTS_EVERY_TIMES
            recorder.as_own(self._write_facts)
        every_step = bounded is not None or self.attention.wants_every_step or not self.flops.is_over
        if xray is not None and not xray.done and torch.cuda.is_initialized():
            every_step = True
            if bounded is None:
                xray.step_ended()
        if self._tuner is not None:
            self._tuner.step_ended(recorder.steps)
            every_step = every_step or self._tuner.wants_every_step
        self.next_look = recorder.steps + _LOOK_EVERY_STEPS
        if every_step or (applied is not None and applied.wants_every_step):
            self.next_look = recorder.steps + 1
        if applied is not None:
            first = self._writer is not None and self.folder == self.options.folder
            recorder.as_own(functools.partial(applied.step_ended, first=first))
        if bounded is not None:
            if not bounded.goes_on(self.loaders.batches_ready(recorder.train_loaders)):
                self._end_the_script()
            bounded.step_begins()

    def _end_the_script(self) -> NoReturn:
        self.close()
        if self.options.trial is not None:
            sys.stdout.flush()
            os._exit(0)  # a script that catches SystemExit would go on to its checkpoint
        if not in_kernel():
            threading.Thread(target=_exit_after_grace, name="flatout-grace", daemon=True).start()
        raise SystemExit(0)

    # -- writing

    def _now_and_then(self) -> None:
        if self._bounded is not None:
            self._bounded.end_if_hung()
        self._answer_if_asked()

    def _answer_if_asked(self) -> None:
        """Where no step comes, the launcher asks what this process is doing."""
        if self._answered or self._writer is not None or not is_asked(self.options.folder):
            return
        self._answered = True
        doing = in_words(self.recorder.thread)
        if doing:
            answer(self.options.folder, doing)

    def _open_trace(self) -> None:
        rank, world_size = run_facts.ranks()
        info = RunInfo(
            name=self.options.name,
            command=self.options.command if in_kernel() else tuple(sys.orig_argv),
            host=socket.gethostname(),
            rank=rank,
            world_size=world_size,
            pid=os.getpid(),
            started_unix_s=time.time() - (time.monotonic() - self._began_s),
            started_s=self._began_s,
        )
        self._writer = _first_free(self.options.folder, info)
        if not self.stacks.running:
            self.stacks.start()
        self._look_at_optimizer()
        for step in self._early:
            self._writer.write(step)
        self._early.clear()

    def _emit(self, step: Step | LightSteps) -> None:
        if self._writer is None:
            self._early.append(step)
        else:
            self._writer.write(step)
        if self._xray is not None:
            self._xray.emitted(step)
        if self._tuner is not None:
            self._tuner.saw(step)

    def _write_facts(self) -> None:
        self.settings.note_config_modules()
        modules = self._process.roots.made  # the model may be gone
        self._exchange = run_facts.gradient_exchange(modules) or self._exchange
        self._parallel = run_facts.parallel(modules) or self._parallel
        self._look_at_optimizer()
        facts = dataclasses.replace(
            run_facts.in_force(self._optimizer_facts),
            loaders=self.loaders.kinds(self.recorder.train_loaders),
            loaders_side_by_side=self.recorder.evaluation.side_by_side,
            autocast=tuple(sorted(self.autocast)) or ("None",),
            gradient_exchange=self._exchange,
            parallel=self._parallel,
            attention=self.attention.found,
            step_flops=self.flops.of_a_step,
            settings=tuple(self.settings.read),
            own_cost=self.own_cost(),
        )
        applied = self._process.applied
        if applied is not None and applied.ledger.changes:
            entries = self._tuner.entries() if self._tuner is not None else applied.ledger.entries()
            facts = dataclasses.replace(facts, changes=entries, compile_s=applied.compile_s)
        self._write(FactsRecord(time_s=time.monotonic(), values=facts))
        self._write(self.stacks.record())

    def _look_at_optimizer(self) -> None:
        optimizer = self._last_optimizer()
        if optimizer is not None:  # the function that trained may have returned
            self._optimizer_facts = run_facts.optimizer_facts(optimizer)

    def own_cost(self) -> OwnCost:
        """What measuring has cost so far; writing happens on a thread of its own."""
        steps = max(1, self.recorder.steps)
        measuring_us = self.recorder.own_s / steps * 1e6
        writing_us = (self._writer.busy_s if self._writer is not None else 0.0) / steps * 1e6
        return OwnCost(us_per_step=measuring_us + writing_us, measuring_us=measuring_us, writing_us=writing_us)

    def note(self, text: str) -> None:
        """Write a note into the trace."""
        self._write(Note(time_s=time.monotonic(), text=text))

    def _write(self, record: Any) -> None:
        if self._writer is not None:
            self._writer.write(record)

    # -- the end

    def _close_at_exit(self) -> None:
        """Python keeps the exception that ended a script; in a notebook it may be an old one."""
        if in_kernel():
            self.close()
        else:
            self.close(getattr(sys, "last_value", None))

    def close(self, raised: BaseException | None = None) -> None:
        """End the recording, because of what was `raised` or for no reason; safe to call twice."""
        if self.closed:
            return
        self.closed = True
        self._time.guarded(self._finish)
        self._time.guarded(self._process.meters.finish)
        self._take_off()
        os.environ.pop(RANK, None)
        atexit.unregister(self._close_at_exit)
        end = End(time_s=time.monotonic())
        if raised is not None:  # what it says may be secret: its type and its place are enough
            end = dataclasses.replace(end, error=type(raised).__name__, where=raised_at(raised.__traceback__))
        if self._writer is not None:
            self._time.guarded(self._writer.write, end)
            self._writer.close()

    def _finish(self) -> None:
        writer = self._writer
        if writer is None:
            return
        self.recorder.finish()
        if self._xray is not None:
            self._xray.finish()
        applied = self._process.applied
        if applied is not None:
            applied.finish(writer.path.with_name(f"proof-{run_facts.ranks()[0]:05d}.jsonl"))
        self._write_facts()
        if applied is not None and self._tuner is None:  # which has said what it decided
            for entry in applied.ledger.entries():
                if not entry.applied:
                    self.note(f"{entry.name} was not changed: {entry.how}")

    def _fail(self, problem: BaseException) -> None:
        what = str(problem) if isinstance(problem, FlatoutError) else f"{type(problem).__name__}: {problem}"
        text = f"flatout stopped measuring: {redact_text(what)}; training goes on"
        print(text, file=sys.stderr)
        self.note(text)

    def abandon(self) -> None:
        """Take everything off and write nothing more: this is another process."""
        self.closed = True
        self._take_off()

    def _take_off(self) -> None:
        self.stacks.stop()
        self._time.leave()


def _first_free(folder: Path, info: RunInfo) -> TraceWriter:
    """A writer into `folder`; into folder-2, folder-3 … where the command trains more than once."""
    for path in (folder, *(folder.with_name(f"{folder.name}-{n}") for n in range(2, _RECORDINGS))):
        if not (path / f"rank-{info.rank:05d}.jsonl").exists():
            return TraceWriter(path, info)
    raise TraceError(f"{folder} has been recorded into {_RECORDINGS} times")


def _exit_after_grace() -> None:
    time.sleep(_GRACE_S)
    os._exit(0)
