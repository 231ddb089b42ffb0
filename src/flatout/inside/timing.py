"""What happens in the training thread (Timing: the TIME stage of the patch layer), and what the GPU
does meanwhile (CudaClock, LossReader). A Recorder gets both.

An exception of ours takes all of this off, once and with one line; the script's calls go through.
CUDA is touched by the training thread only, never while a graph is captured, and nothing waits for
it.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import sys
from collections.abc import Callable, Mapping
from itertools import count, pairwise
from threading import Timer, get_ident
from traceback import walk_stack
from types import CodeType, FrameType, FunctionType
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.data.dataloader as torch_loader
from torch.compiler import is_dynamo_compiling
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from flatout.inside import recorder as recorder_module
from flatout.inside.patches import TABLE, Call, PatchPoint, Subscriber
from flatout.inside.recorder import COPY, DATA, GC, OPTIMIZER, SYNC, Recorder
from flatout.inside.root_modules import RootModules, WeakIdMap
from flatout.inside.stacks import caller
from flatout.model.records import WRAPPED_CALL

if TYPE_CHECKING:
    from flatout.inside.recording import Recording

_LOADER = "torch.utils.data.dataloader.DataLoader"
_ITERATOR = "torch.utils.data.dataloader._BaseDataLoaderIter"
_MOMENT_S = 0.05
_STEPS_TO_FOLLOW = 3  # optimizer steps in another thread
_LOSSES_IN_FLIGHT = 128

Phase = Callable[..., str | None]


class Timing:
    """Times the training thread's calls for one Recorder, and tells a Recording what else it wants to
    know."""

    def __init__(self, time: Subscriber, roots: RootModules, recorder: Recorder, recording: Recording) -> None:
        self._recorder = recorder
        self._recording = recording
        self._roots = roots
        self._time = time
        self._guarded = time.guarded
        self._loaders, self._numbers = WeakIdMap(), count(1)
        self._optimizers = WeakIdMap()
        self._optimizer_calls = 0
        self._steps_elsewhere = 0  # optimizer steps in another thread, in a row
        self._pid = os.getpid()

    def install(self) -> None:
        """Put every wrapper in place."""
        time = self._time
        self._roots.start_timing(time, self._recorder)
        time.time(f"{_ITERATOR}.__next__", self._next_batch)
        time.time("queue.Queue.get", self._get_from_queue)
        time.time("torch.autograd.backward", self._run_backward)
        time.time("torch.Tensor.to", self._move)
        time.around(f"{_LOADER}.__iter__", self._begin_pass)
        time.around("torch.compile", self._compile_and_time)
        time.around("torch.amp.grad_scaler.GradScaler.step", self._scaler_step)
        time.before("torch.autocast.__enter__", self._note_autocast)
        time.before("os._exit", self._close_before_exit)
        time.after(
            "torch.optim.optimizer.Optimizer.__init__", lambda optimizer, *_, **__: self._optimizers.put(optimizer)
        )
        self._install_optimizer_steps()
        self._install_collections()
        self._install_phases()
        time.patches.when_imported("torch._dynamo.eval_frame", _skip_our_code)

    def _install_phases(self) -> None:
        special: dict[str, Phase] = {
            "concurrent.futures._base.Future.result": lambda future, *_, **__: _when(
                not (self._recorder.busy or future.done()), DATA
            ),
            "torch.Tensor.cuda": lambda tensor, *_, **__: _when(not tensor.is_cuda, COPY),
            "torch.Tensor.pin_memory": lambda *_, **__: _when(torch.cuda.is_initialized(), COPY),
            "torch.Tensor.copy_": lambda to, source, *_, **__: _when(_copies_to_gpu(to, source), COPY),
            # Events of ours name their phase.
            "torch.cuda.streams.Event.synchronize": lambda event: getattr(event, "phase", SYNC),
        }
        for patch in TABLE:
            if not patch.phase:
                continue
            phase = _phase_of_reading if patch.owner == "torch.Tensor" else _always(patch.phase)
            for where in patch.attributes:
                self._time.time(where, functools.partial(self._build_phase, special.get(where, phase), patch.computes))

    def _close_before_exit(self, status: int) -> None:
        if os.getpid() == self._pid:
            self._recording.close()

    def _build_phase(self, phase: Phase, computes: bool, point: PatchPoint) -> Any:
        """Time a call as what `phase(*arguments)` says, if it is not None; what `computes` not in
        light steps."""
        recorder, time = self._recorder, self._time

        def timed(*args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling() or time.off or (computes and recorder.light):
                return point.call(*args, **kwargs)
            if get_ident() != recorder.thread:
                return point.call(*args, **kwargs)
            named = None
            try:
                named = phase(*args, **kwargs)
                if named is not None:
                    recorder.push(named, caller() if named == SYNC else None)
            except Exception as problem:
                time.failed(problem)
            try:
                if phase is _phase_of_reading and args[0].requires_grad:
                    return _call_from(sys._getframe(1), point.call, args, kwargs)
                return point.call(*args, **kwargs)
            finally:
                if named is not None and not time.off:
                    time.guarded(recorder.pop)

        return timed

    # -- data

    def _next_batch(self, point: PatchPoint) -> Any:
        recorder, time, fetch = self._recorder, self._time, self._fetch

        def next_batch(iterator: Any) -> Any:
            if time.off or get_ident() != recorder.thread:
                return point.call(iterator)
            return fetch(getattr(iterator, "_flatout_loader", 0), point.call, iterator)

        return next_batch

    def _begin_pass(self, call: Call, loader: Any) -> Any:
        number = self._guarded(self._number_of, loader)
        self._guarded(self._recording.loader_seen, number, loader)
        iterator = call(loader)
        if isinstance(iterator, torch_loader._BaseDataLoaderIter):  # PyTorch's, and those of flatout.feed
            iterator._flatout_loader = number or 0  # type: ignore[attr-defined]
            if not loader.num_workers:  # PyTorch's does not hold it, and the check for writes ends with it
                iterator._flatout_of = loader  # type: ignore[attr-defined]
        return iterator

    def _number_of(self, loader: Any) -> int:
        """A number for each loader; an id may be given to another."""
        number: int | None = self._loaders.get(loader)
        if number is None:
            number = next(self._numbers)
            self._loaders.put(loader, number)
        return number

    def _get_from_queue(self, point: PatchPoint) -> Any:
        recorder, time = self._recorder, self._time

        def get(source: Any, *args: Any, **kwargs: Any) -> Any:
            # Threads of the user's that prefetch hand their batches over by such a queue.
            if is_dynamo_compiling() or time.off or get_ident() != recorder.thread:
                return point.call(source, *args, **kwargs)
            if recorder.busy or not recorder.steps:
                return point.call(source, *args, **kwargs)
            return self._fetch(self._guarded(self._number_of, source) or 0, point.call, source, *args, **kwargs)

        return get

    def _fetch(self, loader: int, fetch: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A batch, with the waiting for it timed; a look at its dataset, before and after, is our own
        work."""
        recorder, loaders = self._recorder, self._recording.loaders
        if loader not in loaders.watched:
            return self._fetch_timed(loader, fetch, *args, **kwargs)
        self._guarded(recorder.as_own, functools.partial(loaders.before_batch, loader))
        try:
            return self._fetch_timed(loader, fetch, *args, **kwargs)
        finally:
            self._guarded(recorder.as_own, functools.partial(loaders.after_batch, loader))

    def _fetch_timed(self, loader: int, fetch: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A batch, fetched or replayed."""
        recorder, ceiling, learns = self._recorder, self._recording.ceiling, torch.is_grad_enabled()
        if recorder.light:
            if learns and loader in recorder.train_loaders:
                return self._fetch_lightly(loader, fetch, *args, **kwargs)
            self._guarded(recorder.look_closely)
        self._guarded(recorder.fetching, loader, learns)
        samples = None
        try:
            batch = self._guarded(ceiling.batch, loader) if ceiling is not None else None
            if batch is None:
                batch = fetch(*args, **kwargs)
                if ceiling is not None:
                    self._guarded(ceiling.keep, loader, batch)
            samples = self._guarded(batch_size, batch) or 0
            return batch
        finally:
            if not self._time.off:
                self._guarded(recorder.fetched, samples)
                tokens = self._recording.loaders.tokens_of(loader)
                if samples and tokens is not None and tokens.wants(batch):
                    self._guarded(recorder.as_own, functools.partial(tokens.look, batch))

    def _fetch_lightly(self, loader: int, fetch: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        recorder, ceiling = self._recorder, self._recording.ceiling
        start_s, batch, recorder.waiting = recorder.clock(), None, True
        try:
            batch = fetch(*args, **kwargs)
            return batch
        finally:
            recorder.waiting = False
            try:
                samples = None if batch is None else batch_size(batch) or 0
                recorder.tape.append((loader, start_s, recorder.clock(), samples))
                if ceiling is not None and batch is not None:
                    ceiling.keep(loader, batch)
            except Exception as problem:
                self._time.failed(problem)

    # -- forward, backward, optimizer

    def _run_backward(self, point: PatchPoint) -> Any:
        recorder, time = self._recorder, self._time

        def run_backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling() or time.off or get_ident() != recorder.thread:
                return point.call(tensors, *args, **kwargs)
            if recorder.light:
                recorder.tape.append(None)
                return point.call(tensors, *args, **kwargs)
            time.guarded(recorder.backward, tensors)
            try:
                return point.call(tensors, *args, **kwargs)
            finally:
                if not time.off:
                    time.guarded(recorder.pop)

        return run_backward

    def _note_autocast(self, region: Any) -> None:
        if region._enabled:
            self._recording.autocast.add(str(region.fast_dtype).removeprefix("torch."))

    def _compile_and_time(self, call: Call, model: Any = None, *args: Any, **kwargs: Any) -> Any:
        compiled = call(model, *args, **kwargs)
        if model is None or isinstance(model, torch.nn.Module) or self._time.off:
            return compiled  # a decorator comes back here with its function; a module is timed as such
        return self._around_compiled(model, compiled)

    def _around_compiled(self, function: Any, compiled: Any) -> Any:
        """Time a compiled function. An optimizer step in it calls no hook: it shows by what was
        written to."""
        recorder, roots = self._recorder, self._roots
        steps_optimizer = isinstance(getattr(function, "__self__", None), torch.optim.Optimizer)

        @functools.wraps(compiled)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling() or roots.is_untimed():
                return compiled(*args, **kwargs)
            calls, written, closely = self._optimizer_calls, self._guarded(self._written) or {}, not recorder.light
            if closely and steps_optimizer:
                self._guarded(recorder.push, OPTIMIZER)
            elif closely:
                roots.begin(learns=torch.is_grad_enabled(), training=True, trained=True)
            try:
                result = compiled(*args, **kwargs)
            finally:
                if closely:
                    roots.end()
            if calls == self._optimizer_calls and not self._time.off:
                now_written = self._guarded(self._written) or written
                for optimizer in self._optimizers:
                    if now_written.get(id(optimizer)) != written.get(id(optimizer)):
                        self._stepped(optimizer)
            return result

        return timed

    def _written(self) -> dict[int, int]:
        """How often each optimizer's parameters were written to; the first and the last of a group tell."""
        written: dict[int, int] = {}
        for optimizer in self._optimizers:
            groups = [group["params"] for group in optimizer.param_groups]
            written[id(optimizer)] = sum(p._version for group in groups for p in group[:1] + group[-1:])
        return written

    def _install_optimizer_steps(self) -> None:
        recorder, time = self._recorder, self._time
        running: list[int] = []  # steps that have begun, by their depth (0: not split); one may call another

        def leave_raised(frame: FrameType) -> None:
            """Only steps whose frames are there still go on; frames are not kept, as they hold what
            callers have."""
            going_on = _callers_like(frame)
            depths = [depth for depth in running[going_on:] if depth]
            del running[going_on:]
            if depths:
                recorder.leave(depths[0])

        def before(optimizer: Any, *_: Any) -> None:
            if is_dynamo_compiling() or time.off or get_ident() != recorder.thread:
                return
            if running:
                self._guarded(leave_raised, sys._getframe(1))
            depth = 0
            if not recorder.light:
                depth = self._guarded(recorder.optimizer_begins) or 0
            running.append(depth)

        def after(optimizer: Any, *_: Any) -> None:
            if is_dynamo_compiling() or time.off:
                return
            if get_ident() != recorder.thread:
                self._steps_elsewhere += 1
                if recorder.steps and self._steps_elsewhere <= _STEPS_TO_FOLLOW:
                    return
                running.clear()
                self._guarded(recorder.move_here)
            self._steps_elsewhere = 0
            self._optimizer_calls += 1
            depth = running.pop() if running else 0
            if depth:
                self._guarded(recorder.leave, depth)
            if not (running or time.off):
                self._stepped(optimizer)

        for handle in (register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)):
            time.on_leaving(handle.remove)

    def _scaler_step(self, call: Call, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        calls = self._optimizer_calls
        result = call(scaler, optimizer, *args, **kwargs)
        if calls == self._optimizer_calls and not self._time.off and get_ident() == self._recorder.thread:
            self._stepped(optimizer)  # infinities were found and the optimizer was left out: the step is over
        return result

    def _stepped(self, optimizer: Any) -> None:
        """An optimizer is through. The recording may end the run here, by SystemExit."""
        recorder = self._recorder
        try:
            if recorder.optimizer_ended(id(optimizer)):
                if recorder.steps >= self._roots.next_look:
                    self._roots.find(optimizer)
                if recorder.steps >= self._recording.next_look:
                    self._recording.step_ended(optimizer)
        except Exception as problem:
            self._time.failed(problem)

    # -- copies

    def _move(self, point: PatchPoint) -> Any:
        recorder = self._recorder
        timed = self._build_phase(_phase_of_move, False, point)

        def to(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            # The commonest call of all.
            if is_dynamo_compiling() or (recorder.light and not tensor.is_cuda):
                return point.call(tensor, *args, **kwargs)
            return timed(tensor, *args, **kwargs)

        return to

    # -- garbage collections

    def _install_collections(self) -> None:
        recorder, time = self._recorder, self._time

        def collecting(phase: str, info: dict[str, int]) -> None:
            if info["generation"] < 2 or time.off or get_ident() != recorder.thread:
                return
            if sys._getframe(1).f_globals is vars(recorder_module):
                return  # the recorder itself set off this collection
            if phase == "start":
                time.guarded(recorder.push, GC)
            else:
                time.guarded(recorder.pop)

        def report_or_raise(call: Call, unraisable: Any) -> None:
            """A signal during a collection runs its handler in our callback, where nothing can be raised.

            It may come again while another's callback runs.
            """
            problem = unraisable.exc_value
            if problem is not None and (unraisable.object is collecting or hasattr(problem, "_flatout_again")):
                _raise_later(get_ident(), problem)
            else:
                call(unraisable)

        time.around("sys.unraisablehook", report_or_raise)
        gc.callbacks.append(collecting)
        time.on_leaving(lambda: gc.callbacks.remove(collecting))


def batch_size(batch: Any) -> int | None:
    """How many samples a batch has: the length of the first tensor or list found in it."""
    if type(batch) in (list, tuple) and batch and type(batch[0]) is torch.Tensor and batch[0].ndim:
        return batch[0].shape[0]
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.dim() else 1
    if isinstance(batch, list | tuple):
        items: Any = batch
    elif hasattr(batch, "keys"):
        items = (batch[key] for key in batch)
    else:
        return None
    for item in items:
        size = batch_size(item)
        if size is not None:
            return size
    return len(batch) if isinstance(batch, list) else None


def tensors_in(batch: Any) -> list[Any]:
    """Every tensor of a batch, in order."""
    if isinstance(batch, Mapping):
        return [tensor for item in batch.values() for tensor in tensors_in(item)]
    if isinstance(batch, list | tuple):
        return [tensor for item in batch for tensor in tensors_in(item)]
    return [batch] if isinstance(batch, torch.Tensor) else []


def _phase_of_move(tensor: Any, *args: Any, **kwargs: Any) -> str | None:
    """What `tensor.to(*args, **kwargs)` is: waiting for a GPU, or a copy to one."""
    target = kwargs.get("device", args[0] if args else None)
    if tensor.is_cuda:
        return _when(str(target) == "cpu", SYNC)
    to_gpu = isinstance(target, int) or str(target).startswith("cuda")
    if isinstance(target, torch.Tensor):
        to_gpu = target.is_cuda
    return _when(to_gpu and torch.cuda.is_initialized(), COPY)


def _phase_of_reading(tensor: Any, *_: Any, **__: Any) -> str | None:
    return _when(is_on_gpu(tensor), SYNC)


def _call_from(script: FrameType, call: Call, args: Any, kwargs: Any) -> Any:
    """Call as if this line of the script did: PyTorch's warnings then name it, each line once."""
    code = _CALL.replace(co_filename=script.f_code.co_filename, co_firstlineno=script.f_lineno)
    if "torch._dynamo.eval_frame" in sys.modules:
        sys.modules["torch._dynamo.eval_frame"].skip_code(code)
    return FunctionType(code, script.f_globals)(call, args, kwargs)


_CALL = (lambda call, args, kwargs: call(*args, **kwargs)).__code__.replace(co_name=WRAPPED_CALL)


def is_on_gpu(tensor: Any) -> bool:
    """Whether reading this tensor makes the host wait for a GPU."""
    return bool(tensor.is_cuda)


def _copies_to_gpu(target: Any, source: Any) -> bool:
    return bool(target.is_cuda) and isinstance(source, torch.Tensor) and not source.is_cuda


def _when(true: bool, phase: str) -> str | None:
    return phase if true else None


def _always(phase: str) -> Phase:
    return lambda *_, **__: phase


def _raise_later(thread: int, problem: BaseException) -> None:
    """Raise an exception in a thread a moment from now, where it will not be lost."""
    kind: Any = type(problem)
    if hasattr(problem, "_flatout_again"):
        kind = kind.__base__

    def like_the_problem(again: BaseException) -> None:
        BaseException.__init__(again, *problem.args)
        vars(again).update(vars(problem))
        if isinstance(problem, SystemExit):
            again.code = problem.code  # type: ignore[attr-defined]

    names = {"__init__": like_the_problem, "__module__": kind.__module__, "_flatout_again": True}
    again = ctypes.py_object(type(kind.__name__, (kind,), names))
    Timer(_MOMENT_S, ctypes.pythonapi.PyThreadState_SetAsyncExc, (ctypes.c_ulong(thread), again)).start()


def _callers_like(frame: FrameType) -> int:
    """How many of the calls that led to this one run the same code."""
    return sum(above.f_code is frame.f_code for above, _ in walk_stack(frame)) - 1


def _skip_our_code(eval_frame: Any) -> None:
    """Keep the compiler out of our functions that run in the training thread."""
    things: list[Any] = []
    for name, module in list(sys.modules.items()):
        if name.startswith("flatout.inside."):
            things += vars(module).values()
    for kind in [thing for thing in things if isinstance(thing, type)]:
        things += vars(kind).values()
    waiting = [thing.__code__ for thing in things if isinstance(thing, FunctionType)]
    while waiting:
        code = waiting.pop()
        waiting += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        eval_frame.skip_code(code)


# -- the GPU's side


class CudaClock:
    """Drops events into the stream a step began in (copies ahead of time go through another one), and
    reads the time between neighbours once they have passed."""

    def __init__(self) -> None:
        self._pool: list[Any] = []
        self._stream: Any = None

    def mark(self, *, begins: bool) -> Any:
        """An event; None where CUDA is not in use or a graph is being captured."""
        if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
            return None
        if begins:
            before, self._stream = self._stream, torch.cuda.current_stream()
            if before != self._stream:
                self._pool.clear()  # an event belongs to the GPU it was first recorded on
        event = self._pool.pop() if self._pool else torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def between(self, marks: list[Any]) -> list[float] | None:
        """Milliseconds between neighbours; None while the GPU has not reached the last one."""
        if torch.cuda.is_current_stream_capturing() or not marks[-1].query():
            return None
        times = [max(0.0, first.elapsed_time(second)) for first, second in pairwise(marks)]
        if marks[0].device == self._stream.device:
            self._pool += marks
        marks.clear()
        return times


class LossReader:
    """Copies scalar losses to the host without waiting for them."""

    def __init__(self) -> None:
        self._slots: Any = None
        self._next = 0

    def take(self, tensors: Any, *, from_gpu: bool) -> Any:
        """A ticket for the first of these; None where it is not one number, or on a GPU and not
        `from_gpu`."""
        loss = tensors[0] if isinstance(tensors, list | tuple) and tensors else tensors
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            return None
        loss = loss.detach()
        if not loss.is_cuda:
            return float(loss)
        if not from_gpu or torch.cuda.is_current_stream_capturing():
            return None
        if self._slots is None:
            self._slots = torch.zeros(_LOSSES_IN_FLIGHT, pin_memory=True)
        slot = self._slots[self._next % _LOSSES_IN_FLIGHT]
        self._next += 1
        slot.copy_(loss.reshape(()), non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return slot, event

    def read(self, ticket: Any) -> float | None:
        """The value behind a ticket, if it has arrived."""
        if isinstance(ticket, float):
            return ticket
        slot, event = ticket
        return float(slot) if event.query() else None
