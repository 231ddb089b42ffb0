"""One training process being recorded: Recorder, Hooks and TraceWriter, tied together.

Nothing is written before the first optimizer step, so a process that never trains leaves no file. Whatever goes wrong
here is said once, switched off, and the user's run goes on.
"""

from __future__ import annotations

import atexit
import functools
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.utils.data.dataloader as stock

from flatout.errors import FlatoutError
from flatout.inject.ceiling import Ceiling
from flatout.inject.startup import when_imported
from flatout.sense import facts as look
from flatout.sense.clock import CudaClock, LossReader
from flatout.sense.hooks import Hooks, Listener
from flatout.sense.options import Options
from flatout.sense.recorder import OWN, Recorder
from flatout.sense.settings import Settings, hide_in_arguments
from flatout.sense.worker import Meter, measure_fetcher
from flatout.sense.xray import Profiler, read_kernels
from flatout.trace import Facts, Note, RunInfo, Step, TraceWriter

_FACTS_AT_STEP = 3
_XRAY_STEPS = 9  # the first bears the profiler's start and is left out
_XRAY_AFTER_STEPS = 12
_XRAY_AFTER_S = 2.0
_RECOVERY_STEPS = 12
_GRACE_S = 10.0

_session: Session | None = None


def begin(options: Options, settings: Settings) -> Session | None:
    """Start recording this process (once). In a loader worker only its own work is measured."""
    global _session
    measure_workers(options)
    if torch.utils.data.get_worker_info() is None and _session is None:
        _session = Session(options, settings)
    return _session


class Session(Listener):
    """What goes on in one training process."""

    def __init__(self, options: Options, settings: Settings) -> None:
        self._options = options
        self._settings = settings
        self._writer: TraceWriter | None = None
        self._losses = LossReader()
        gpu = CudaClock() if torch.version.cuda is not None else None
        self._began_s = time.monotonic()
        self._recorder = Recorder(clock=time.monotonic, emit=self._emit, gpu=gpu, losses=self._losses)
        self._hooks = Hooks(self._recorder, self, self._fail)
        self._loaders: dict[int, dict[str, Any]] = {}
        self._autocast: set[str | None] = set()
        self._xray = _XrayPlan(options)
        self._ceiling = Ceiling() if options.max_steps is not None else None
        self._early: list[Step] = []
        self._first_step_s: float | None = None
        self._closed = False
        self._hooks.install()
        for library in Hooks.LIBRARIES:
            when_imported(library, lambda module: self._hooks.after_import(module.__name__))
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self._be_inert)
        self._flush_before_hard_exit()

    # -- what the hooks tell ----------------------------------------------------------------------------------------

    def loader_seen(self, loader: Any) -> None:
        self._loaders[id(loader)] = look.loader_facts(loader)

    def fetched(self, loader: int, batch: Any) -> None:
        if self._ceiling is not None:
            self._ceiling.keep(loader, batch)

    def replayed_batch(self, loader: int) -> Any:
        return self._ceiling.batch(loader) if self._ceiling is not None else None

    def resident_copy(self, tensor: Any, copy: Callable[[], Any]) -> Any:
        return self._ceiling.copy_of(tensor, copy) if self._ceiling is not None else copy()

    def backward_begins(self, tensors: Any) -> None:
        if self._recorder.steps <= _FACTS_AT_STEP:
            self._autocast.add(look.autocast_dtype())
        first = tensors[0] if isinstance(tensors, list | tuple) and tensors else tensors
        wanted = self._recorder.marking or not getattr(first, "is_cuda", False)
        self._recorder.backward(self._losses.take(first) if wanted else None)

    def step_ended(self, optimizer: Any) -> None:
        """A training step is over: the few things that happen once, each at its step."""
        steps = self._recorder.steps
        if steps == 1:
            self._first_step_s = time.monotonic()
            self._recorder.push(OWN)
            self._hooks.guarded(self._open_trace)
            self._recorder.pop()
        if steps == _FACTS_AT_STEP:
            self._hooks.guarded(self._write_facts, optimizer)
        self._last_optimizer = optimizer
        if self._xray.state != "done" and torch.cuda.is_initialized():
            self._hooks.guarded(self._xray.step_ended, self)
        if self._ceiling is not None and not self._hooks.off:
            self._trial_step(steps)

    _last_optimizer: Any = None

    # -- a trial: so many steps, then the ceiling, then out ---------------------------------------------------------

    def _trial_step(self, steps: int) -> None:
        assert self._ceiling is not None
        kind = self._ceiling.kind_of_step(steps - (self._options.max_steps or 0))
        self.resident = kind == "resident"
        if kind is None:
            self.close()
            threading.Thread(target=_exit_after_grace, name="flatout-grace", daemon=True).start()
            raise SystemExit(0)
        if kind != "train":
            self._recorder.set_kind(kind)

    # -- writing ----------------------------------------------------------------------------------------------------

    def _open_trace(self) -> None:
        rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) or 0)
        world = int(os.environ.get("WORLD_SIZE", "1") or 1)
        info = RunInfo(
            name=self._options.name,
            command=hide_in_arguments(tuple(sys.orig_argv)),
            host=socket.gethostname(),
            rank=rank,
            world_size=world,
            pid=os.getpid(),
            started_unix_s=time.time() - (time.monotonic() - self._began_s),
            started_s=self._began_s,
        )
        self._writer = TraceWriter(self._options.folder, info)
        for step in self._early:
            self._writer.write(step)
        self._early.clear()

    def _emit(self, step: Step) -> None:
        if self._writer is None:
            self._early.append(step)
        else:
            self._writer.write(step)
        self._xray.emitted(step)

    def _write_facts(self, optimizer: Any) -> None:
        if self._writer is None:
            return
        self._recorder.push(OWN)
        self._settings.note_config_modules()
        values = look.in_force(optimizer) | {
            "loaders": list(self._loaders.values()),
            "autocast": sorted(str(dtype) for dtype in self._autocast),
            "settings": self._settings.read,
            "own_cost": self._own_cost(),
        }
        self._writer.write(Facts(time_s=time.monotonic(), values=values))
        self._recorder.pop()

    def _own_cost(self) -> dict[str, float]:
        """What measuring has cost so far, from the number of cuts and marks and what each takes here."""
        cut_us, mark_us = _costs_us(self._recorder)
        steps = max(1, self._recorder.steps)
        return {
            "us_per_step": (self._recorder.cuts * cut_us + self._recorder.marks * mark_us) / steps,
            "cut_us": cut_us,
            "mark_us": mark_us,
        }

    def note(self, text: str) -> None:
        """Leave a word in the trace."""
        if self._writer is not None:
            self._writer.write(Note(time_s=time.monotonic(), text=text))

    def write(self, record: Any) -> None:
        """Put one more record into the trace."""
        if self._writer is not None:
            self._writer.write(record)

    def close(self) -> None:
        """Close the books; safe to call twice and from a forked child."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._writer is not None:
                self._recorder.finish()
                self._xray.finish(self)
                if self._last_optimizer is not None:
                    self._write_facts(self._last_optimizer)
                for meter in _meters:
                    meter.write()
        except Exception as problem:
            self._fail(problem)
        finally:
            self._hooks.remove()
            if self._writer is not None:
                self._writer.close()

    def _fail(self, problem: BaseException) -> None:
        what = str(problem) if isinstance(problem, FlatoutError) else f"{type(problem).__name__}: {problem}"
        text = f"flatout stopped measuring: {what}; training goes on"
        print(text, file=sys.stderr)
        self.note(text)

    def _be_inert(self) -> None:
        """In a forked child: the hooks let everything through, nothing is written."""
        self._hooks.off = True
        self._closed = True

    def _flush_before_hard_exit(self) -> None:
        hard_exit = os._exit
        owner = os.getpid()

        @functools.wraps(hard_exit)
        def exit_after_flush(status: int) -> None:
            if os.getpid() == owner:
                self.close()
            hard_exit(status)

        os._exit = exit_after_flush  # type: ignore[assignment]


class _XrayPlan:
    """When the X-ray is taken: once, when the run is warm; then the step time is checked to have recovered."""

    def __init__(self, options: Options) -> None:
        self.state = "waiting" if options.xray else "done"
        early = options.max_steps is not None
        self._after_steps = min(_XRAY_AFTER_STEPS, (options.max_steps or 0) // 3) if early else _XRAY_AFTER_STEPS
        self._after_s = 0.0 if early else _XRAY_AFTER_S
        self._profiler = Profiler()
        self._left = _XRAY_STEPS
        self._results: Any = None
        self._steps: list[Step] = []
        self._before_ms: list[float] = []
        self._after_ms: list[float] = []

    def step_ended(self, session: Session) -> None:
        recorder = session._recorder
        if self.state == "waiting":
            warm_s = time.monotonic() - (session._first_step_s or 0.0)
            if recorder.steps >= self._after_steps and warm_s >= self._after_s:
                recorder.push(OWN)
                self._profiler.start()
                recorder.pop()
                recorder.set_kind("xray")
                self.state = "running"
        elif self.state == "running":
            self._left -= 1
            if self._left:
                recorder.set_kind("xray")
                return
            recorder.push(OWN)
            self._results = self._profiler.stop()
            recorder.pop()
            recorder.set_kind("after xray")
            self.state = "recovering"
        elif len(self._after_ms) >= _RECOVERY_STEPS and len(self._steps) >= _XRAY_STEPS:
            self.state = "done"
            threading.Thread(target=self._read, args=(session,), name="flatout-xray", daemon=True).start()

    def emitted(self, step: Step) -> None:
        if step.kind == "xray":
            self._steps.append(step)
        elif step.kind == "train" and self.state != "done":
            walls = self._after_ms if self._results is not None else self._before_ms
            walls.append(step.wall_ms)

    def finish(self, session: Session) -> None:
        """The run ends: read what there is, if that has not been done."""
        if self.state == "running":
            self._results = self._profiler.stop()
        if self.state in ("running", "recovering"):
            self.state = "done"
            self._read(session)

    def _read(self, session: Session) -> None:
        try:
            xray = read_kernels(self._profiler.kernels(self._results), self._steps[1:])
            if xray is not None:
                session.write(xray.with_recovery(self._recovered()))
        except Exception as problem:
            session.note(f"the X-ray could not be read ({type(problem).__name__}: {problem})")

    def _recovered(self) -> bool | None:
        if len(self._before_ms) < 4 or len(self._after_ms) < 4:
            return None
        before, after = statistics.median(self._before_ms[-_RECOVERY_STEPS:]), statistics.median(self._after_ms)
        return after <= 1.1 * before + 0.1


_meters: list[Meter] = []


def measure_workers(options: Options) -> None:
    """Wrap what torch fetches samples with: in loader workers, and in the training process with num_workers=0."""
    create = stock._DatasetKind.create_fetcher
    if getattr(create, "_flatout", False):
        return
    rank = int(os.environ.get("RANK", "0") or 0)
    path: Path = options.folder / f"workers-{rank:05d}.jsonl"

    @functools.wraps(create)
    def create_fetcher(*args: Any, **kwargs: Any) -> Any:
        fetcher = create(*args, **kwargs)  # type: ignore[no-untyped-call]
        try:
            worker = torch.utils.data.get_worker_info()
            meter = Meter(fetcher.dataset, worker.id if worker is not None else None, path)
            measure_fetcher(fetcher, meter)
            if worker is None:
                _meters.append(meter)
            else:
                _meters[:] = [meter]
        except Exception as problem:
            print(f"flatout: loader work is not measured ({type(problem).__name__}: {problem})", file=sys.stderr)
        return fetcher

    create_fetcher._flatout = True  # type: ignore[attr-defined]
    stock._DatasetKind.create_fetcher = staticmethod(create_fetcher)  # type: ignore[method-assign]


def _costs_us(recorder: Recorder) -> tuple[float, float]:
    """What a cut and a mark take on this machine, measured on a recorder of their own."""
    scratch = Recorder(clock=time.monotonic, emit=lambda step: None)
    start = time.perf_counter()
    for _ in range(200):
        scratch.push("rest")
        scratch.pop()
    return (time.perf_counter() - start) / 400 * 1e6, 4.0


def _exit_after_grace() -> None:
    time.sleep(_GRACE_S)
    os._exit(0)
