"""The patches on torch and a few libraries: they tell a Recorder what the training thread does.

Everything is put on classes and modules, so that earlier imports, subclasses and isinstance keep working, and
everything can be taken off again. A hook that raises is noted once, all hooks come off, and the user's call goes
through as if we had never been there.
"""

from __future__ import annotations

import builtins
import ctypes
import functools
import gc
import logging
import queue
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from itertools import count
from threading import Timer, get_ident
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
import torch.utils.data.dataloader as stock
from torch.compiler import is_dynamo_compiling
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from flatout.inside import recorder as recording
from flatout.inside.calls import batch_size, caller, crosses, names_card, names_cpu, on_card
from flatout.inside.listener import Listener
from flatout.inside.recorder import BACKWARD, CHECKPOINT, COPY, DATA, GC, LOGGING, OPTIMIZER, START, SYNC, Recorder
from flatout.inside.root_modules import Alive, Roots

# Methods that make the host wait for the card, where the tensor is on one.
_SYNC_METHODS = (
    "item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__", "__repr__", "__format__",
)  # fmt: skip
_LOG_METHODS = {
    "torch.utils.tensorboard.writer": (
        "SummaryWriter",
        ("add_scalar", "add_scalars", "add_histogram", "add_image", "add_images", "add_figure", "add_text", "flush"),
    ),
    "wandb.sdk.wandb_run": ("Run", ("log",)),
    "tqdm.std": ("tqdm", ("refresh",)),
}
_SAVE_FUNCTIONS = {"safetensors.torch": ("save_file",), "torch.distributed.checkpoint": ("save",)}
_COMPILER = "torch._dynamo.eval_frame"
_MOMENT_S = 0.05
_STEPS_TO_FOLLOW = 3  # so many optimizer steps in another thread, and we follow training there


def _unseen_by_warnings(function: Any) -> Any:
    """PyTorch warns in the name of whoever calls it. Python passes its import machinery over when it looks for them,
    and knows that by the name of the file: by such a name a warning still names PyTorch's own line, not one of ours."""
    code = function.__code__
    function.__code__ = code.replace(co_filename=f"{code.co_filename} (like importlib._bootstrap)")
    return function


class Hooks:
    """Installs the patches around one Recorder, and takes them off again."""

    def __init__(self, recorder: Recorder, listener: Listener, fail: Callable[[BaseException], None]) -> None:
        self._recorder = recorder
        self._listener = listener
        self._tell = fail
        self._undo: list[Callable[[], None]] = []
        self._roots = Roots(self, recorder)
        self._loaders = _Numbers()
        self._steps_elsewhere = 0
        self.off = False

    def install(self, made: Iterable[Any] = ()) -> None:
        """Put every patch in place; `made` are modules that are there already."""
        self._data()
        self._roots.watch(made)
        self._compute()
        self._optimizer_steps()
        self._copies()
        self._waits()
        self._pauses()

    def modules(self) -> list[Any]:
        """The modules made so far."""
        return list(self._roots.made)

    def remove(self) -> None:
        """Take every patch off."""
        self.off = True
        while self._undo:
            self._undo.pop()()

    def fail(self, problem: BaseException) -> None:
        """Something of ours went wrong: off with all of it, once."""
        if not self.off:
            self.remove()
            self._tell(problem)

    def after_import(self, name: str) -> None:
        """A library has just been imported: patch what it brings."""
        module = sys.modules.get(name)
        if self.off or module is None:
            return
        if name in _LOG_METHODS:
            owner, methods = _LOG_METHODS[name]
            for method in methods:
                self.around(getattr(module, owner, None), method, lambda *_, **__: LOGGING)
        for function in _SAVE_FUNCTIONS.get(name, ()):
            self.around(module, function, lambda *_, **__: CHECKPOINT)
        if name == _COMPILER:
            for code in _our_code():
                module.skip_code(code)

    LIBRARIES = (*_LOG_METHODS, *_SAVE_FUNCTIONS, _COMPILER)

    # -- what the wrappers are made of ------------------------------------------------------------------------------

    def around(self, owner: Any, name: str, phase: Callable[..., str | None], *, computes: bool = False) -> None:
        """Time `owner.name` as the phase that `phase(*arguments)` names; None lets the call pass untimed.

        What `computes` is timed only in steps that are looked at closely.
        """
        original = getattr(owner, name, None)
        if original is None:
            return
        recorder = self._recorder

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling() or self.off or (computes and recorder.light) or get_ident() != recorder.thread:
                return original(*args, **kwargs)
            named = None
            try:
                named = phase(*args, **kwargs)
                if named is not None:
                    recorder.push(named, caller() if named == SYNC else None)
            except Exception as problem:
                self.fail(problem)
            try:
                return original(*args, **kwargs)
            finally:
                if named is not None and not self.off:
                    self.guarded(recorder.pop)

        self.replace(owner, name, timed)

    def replace(self, owner: Any, name: str, new: Any) -> None:
        """Set an attribute, remembering how to undo it."""
        had = name in vars(owner)
        old = vars(owner).get(name)

        def undo() -> None:
            if vars(owner).get(name) is not new:
                return  # someone has put theirs on top of ours: it stays, and ours lets everything through
            if had:
                setattr(owner, name, old)
            else:
                delattr(owner, name)

        setattr(owner, name, new)
        self._undo.append(undo)

    def on_removal(self, undo: Callable[[], None]) -> None:
        """What to do when the patches come off."""
        self._undo.append(undo)

    def guarded(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call something of ours; what it raises ends us, not the run."""
        try:
            return function(*args)
        except Exception as problem:
            self.fail(problem)
            return None

    # -- data -------------------------------------------------------------------------------------------------------

    def _data(self) -> None:
        recorder, listener = self._recorder, self._listener
        fetch = stock._BaseDataLoaderIter.__next__
        iterate, build = stock.DataLoader.__iter__, stock._BaseDataLoaderIter.__init__

        @functools.wraps(fetch)
        def next_batch(iterator: Any) -> Any:
            if self.off or get_ident() != recorder.thread:
                return fetch(iterator)
            return self._fetch(getattr(iterator, "_flatout_loader", 0), fetch, iterator)

        def seen(loader: Any) -> None:
            listener.loader_seen(self._loaders.of(loader), loader)

        @functools.wraps(iterate)
        def begin_pass(loader: Any) -> Any:
            if not self.off:
                self.guarded(seen, loader)
            return iterate(loader)

        @_unseen_by_warnings
        @functools.wraps(build)
        def numbered(iterator: Any, loader: Any) -> None:
            # Whoever builds it, stock or flatout.feed: what a loader's iterators have in common is this class.
            iterator._flatout_loader = 0 if self.off else self.guarded(self._loaders.of, loader) or 0
            if not loader.num_workers:  # stock's does not hold it, and who watches it goes by its life
                iterator._flatout_of = loader
            build(iterator, loader)

        get = queue.Queue.get

        @functools.wraps(get)
        def get_from_queue(source: Any, *args: Any, **kwargs: Any) -> Any:
            # A thread of the user's that prefetches hands its batches over by such a queue.
            if (
                is_dynamo_compiling()
                or self.off
                or get_ident() != recorder.thread
                or recorder.busy
                or not recorder.steps
            ):
                return get(source, *args, **kwargs)
            return self._fetch(self.guarded(self._loaders.of, source) or 0, get, source, *args, **kwargs)

        self.replace(stock._BaseDataLoaderIter, "__next__", next_batch)
        self.replace(stock._BaseDataLoaderIter, "__init__", numbered)
        self.replace(stock.DataLoader, "__iter__", begin_pass)
        self.replace(queue.Queue, "get", get_from_queue)
        self.around(stock.DataLoader, "__iter__", lambda *_: START)
        self.around(Future, "result", lambda f, *_, **__: None if recorder.busy or f.done() else DATA)

    def _watched(self, loader: int, fetch: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.guarded(self._listener.fetches, loader)
        try:
            return fetch(*args, **kwargs)
        finally:
            self.guarded(self._listener.has_fetched, loader)

    def _fetch(self, loader: int, fetch: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A batch, fetched or replayed, with the waiting for it timed."""
        recorder, listener = self._recorder, self._listener
        if loader in listener.watched:
            fetch = functools.partial(self._watched, loader, fetch)
        if recorder.light:
            if loader in recorder.train_loaders and torch.is_grad_enabled():
                start_s, batch, recorder.waiting = recorder.clock(), None, True
                try:
                    batch = fetch(*args, **kwargs)
                    return batch
                finally:
                    recorder.waiting = False
                    try:
                        samples = None if batch is None else batch_size(batch) or 0
                        recorder.tape.append((loader, start_s, recorder.clock(), samples))
                        if listener.replays and batch is not None:
                            listener.fetched(loader, batch)
                    except Exception as problem:
                        self.fail(problem)
            self.guarded(recorder.look_closely)
        self.guarded(recorder.fetching, loader, torch.is_grad_enabled())
        samples = None
        try:
            batch = self.guarded(listener.replayed_batch, loader) if listener.replays else None
            if batch is None:
                batch = fetch(*args, **kwargs)
                if listener.replays:
                    self.guarded(listener.fetched, loader, batch)
            samples = self.guarded(batch_size, batch) or 0
            return batch
        finally:
            if not self.off:
                self.guarded(recorder.fetched, samples)

    # -- forward, backward, optimizer -------------------------------------------------------------------------------

    def _compute(self) -> None:
        recorder, listener = self._recorder, self._listener
        backward, compile_ = torch.autograd.backward, torch.compile

        @functools.wraps(backward)
        def run_backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling() or self.off or get_ident() != recorder.thread:
                return backward(tensors, *args, **kwargs)
            if recorder.light:
                recorder.tape.append(None)
                return backward(tensors, *args, **kwargs)
            self.guarded(listener.backward_begins, tensors)
            try:
                return backward(tensors, *args, **kwargs)
            finally:
                if not self.off:
                    self.guarded(recorder.pop)

        @functools.wraps(compile_)
        def compile_and_time(model: Any = None, *args: Any, **kwargs: Any) -> Any:
            compiled: Any = compile_(model, *args, **kwargs)
            if model is None or isinstance(model, torch.nn.Module) or self.off:
                return compiled  # a decorator comes back here with its function; a module is timed as such
            return self._around_compiled(model, compiled)

        self.replace(torch.autograd, "backward", run_backward)
        self.replace(torch, "compile", compile_and_time)
        self.around(torch.autograd, "grad", lambda *_, **__: BACKWARD, computes=True)
        self.around(torch.optim.Optimizer, "zero_grad", lambda *_, **__: OPTIMIZER, computes=True)
        self._mixed_precision()

    def _mixed_precision(self) -> None:
        listener, enter = self._listener, torch.autocast.__enter__

        @functools.wraps(enter)
        def entered(region: Any) -> Any:
            if not self.off and region._enabled and not is_dynamo_compiling():
                self.guarded(listener.autocast_entered, str(region.fast_dtype).removeprefix("torch."))
            return enter(region)  # type: ignore[no-untyped-call]

        self.replace(torch.autocast, "__enter__", entered)

    def _around_compiled(self, function: Any, compiled: Any) -> Any:
        """Time a compiled function. An optimizer step inside calls no hook; it shows by the parameters written to."""
        recorder, roots = self._recorder, self._roots
        steps_optimizer = isinstance(getattr(function, "__self__", None), torch.optim.Optimizer)

        @functools.wraps(compiled)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling() or roots.is_off():
                return compiled(*args, **kwargs)
            calls, versions, closely = self._optimizer_calls, self._versions(), not recorder.light
            if closely and steps_optimizer:
                self.guarded(recorder.push, OPTIMIZER)
            elif closely:
                roots.begin(learns=torch.is_grad_enabled(), training=True, trained=True)
            try:
                result = compiled(*args, **kwargs)
            finally:
                if closely:
                    roots.end()
            if calls == self._optimizer_calls and not self.off:
                for (optimizer, before), (_, after) in zip(versions, self._versions(), strict=False):
                    if before != after:
                        self._stepped(optimizer)
            return result

        return timed

    def _versions(self) -> list[tuple[Any, int]]:
        return self.guarded(self._optimizers.versions) or []

    def _optimizer_steps(self) -> None:
        recorder = self._recorder
        # steps that have begun, by how deep they are called and how deep among the phases: a step may call another.
        # Their frames are not held: one that raised would keep all that its callers have.
        running: list[tuple[int, int]] = []
        self._optimizers = _Optimizers(self)
        self._optimizer_calls = 0

        def forget_what_raised(frame: FrameType, depth: int) -> None:
            while running and not _is_called_by_like(frame, depth - running[-1][0]):
                leave()

        def begin(frame: FrameType, depth: int) -> None:
            forget_what_raised(frame, depth)
            running.append((depth, recorder.optimizer_begins()))

        def leave() -> None:
            _, depth = running.pop()
            if depth:
                recorder.leave(depth)

        def end(optimizer: Any) -> None:
            self._optimizer_calls += 1
            if running:
                leave()
            if not running:
                self._stepped(optimizer)

        def before(optimizer: Any, *_: Any) -> None:
            if is_dynamo_compiling() or self.off or get_ident() != recorder.thread:
                return
            frame = sys._getframe(1)
            depth = _depth(frame)
            if recorder.light:
                if running:
                    self.guarded(forget_what_raised, frame, depth)
                running.append((depth, 0))
            else:
                self.guarded(begin, frame, depth)

        def after(optimizer: Any, *_: Any) -> None:
            if is_dynamo_compiling() or self.off:
                return
            if recorder.light and len(running) == 1 and not running[0][1] and get_ident() == recorder.thread:
                running.clear()
                self._optimizer_calls += 1
                self._stepped(optimizer)
                return
            if get_ident() == recorder.thread:
                self._steps_elsewhere = 0
            elif recorder.steps and self._steps_elsewhere < _STEPS_TO_FOLLOW:
                self._steps_elsewhere += 1
                return
            else:
                running.clear()
                self.guarded(recorder.move_here)
            self.guarded(end, optimizer)

        for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
            for name in ("clip_grad_norm_", "clip_grad_value_"):
                self.around(owner, name, lambda *_, **__: OPTIMIZER, computes=True)
        for handle in (register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)):
            self._undo.append(handle.remove)

        from torch.amp.grad_scaler import GradScaler

        scaler_step = GradScaler.step

        @functools.wraps(scaler_step)
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            calls = self._optimizer_calls
            result = scaler_step(scaler, optimizer, *args, **kwargs)
            if calls == self._optimizer_calls and not self.off and get_ident() == recorder.thread:
                self._stepped(optimizer)  # infinities were found and the optimizer was left out: the step is over
            return result

        self.replace(GradScaler, "step", step)

    def _stepped(self, optimizer: Any) -> None:
        """An optimizer is through. The listener may end the run here, with an exception that is none of ours."""
        try:
            if self._recorder.optimizer_ended(id(optimizer)):
                if self._recorder.steps >= self._roots.next_look:
                    self._roots.find(optimizer)
                if self._recorder.steps >= self._listener.next_look:
                    self._listener.step_ended(optimizer)
        except Exception as problem:
            self.fail(problem)

    # -- copies, and waiting for the card ---------------------------------------------------------------------------

    def _copies(self) -> None:
        recorder, listener = self._recorder, self._listener

        def moving(tensor: Any, *args: Any, **kwargs: Any) -> str | None:
            if tensor.is_cuda:
                return SYNC if names_cpu(args, kwargs) else None
            return COPY if torch.cuda.is_initialized() and names_card(args, kwargs) else None

        move = torch.Tensor.to
        self.around(torch.Tensor, "to", moving)
        timed_move: Any = torch.Tensor.to

        @functools.wraps(move)
        def to(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            # The commonest call of all: in a light step it passes with as little ado as can be.
            if is_dynamo_compiling() or (recorder.light and not tensor.is_cuda):
                return move(tensor, *args, **kwargs)
            return timed_move(tensor, *args, **kwargs)

        self.replace(torch.Tensor, "to", to)
        self.around(torch.Tensor, "cuda", lambda t, *_, **__: None if t.is_cuda else COPY, computes=True)
        self.around(
            torch.Tensor, "pin_memory", lambda *_, **__: COPY if torch.cuda.is_initialized() else None, computes=True
        )
        self.around(torch.Tensor, "copy_", lambda t, s, *_, **__: COPY if crosses(t, s) else None, computes=True)
        for name in ("to", "cuda") if listener.replays else ():
            self._remember(name)

    def _remember(self, name: str) -> None:
        """Let a trial answer with the device copy it made before (see Listener.resident_copy)."""
        listener, timed = self._listener, getattr(torch.Tensor, name)

        @functools.wraps(timed)
        def maybe_resident(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if not listener.resident:
                return timed(tensor, *args, **kwargs)
            copy = functools.partial(timed, tensor, *args, **kwargs)
            return listener.resident_copy(tensor, f"{name} {args} {kwargs}", copy)

        self.replace(torch.Tensor, name, maybe_resident)

    def _waits(self) -> None:
        for name in _SYNC_METHODS:
            self.around(torch.Tensor, name, lambda t, *_, **__: SYNC if on_card(t) else None)
        self.around(torch.cuda, "synchronize", lambda *_, **__: SYNC)
        self.around(torch.cuda.Event, "synchronize", lambda event, *_, **__: getattr(event, "phase", SYNC))
        self.around(torch.cuda.Stream, "synchronize", lambda *_, **__: SYNC)

    # -- pauses -----------------------------------------------------------------------------------------------------

    def _pauses(self) -> None:
        self.around(torch, "save", lambda *_, **__: CHECKPOINT)
        self.around(builtins, "print", lambda *_, **__: LOGGING)
        self.around(logging.Logger, "callHandlers", lambda *_, **__: LOGGING)
        for name in self.LIBRARIES:
            self.after_import(name)
        recorder = self._recorder

        def collecting(phase: str, info: dict[str, int]) -> None:
            if info["generation"] < 2 or self.off or get_ident() != recorder.thread:
                return
            if sys._getframe(1).f_globals is vars(recording):
                return  # in the midst of a cut of our own
            self.guarded(functools.partial(recorder.push, GC) if phase == "start" else recorder.pop)

        report = sys.unraisablehook

        def report_or_raise(unraisable: Any) -> None:
            """A signal that comes during a collection runs its handler in our callback, where nothing can be raised."""
            problem = unraisable.exc_value
            # It may come again while another's callback runs.
            if problem is not None and (unraisable.object is collecting or hasattr(problem, "_flatout_again")):
                _raise_later(get_ident(), problem)
            else:
                report(unraisable)

        self.replace(sys, "unraisablehook", report_or_raise)
        gc.callbacks.append(collecting)
        self._undo.append(lambda: gc.callbacks.remove(collecting))


class _Numbers:
    """A number for each loader that is never given to another, as an id may be."""

    def __init__(self) -> None:
        self._numbers = Alive()
        self._next = count(1)

    def of(self, thing: Any) -> int:
        number: int | None = self._numbers.get(thing)
        if number is None:
            number = next(self._next)
            self._numbers.put(thing, number)
        return number


class _Optimizers:
    """Every optimizer made, for finding those whose steps a compiler has swallowed."""

    def __init__(self, hooks: Hooks) -> None:
        self._made = Alive()
        init = torch.optim.Optimizer.__init__

        @functools.wraps(init)
        def noted(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            init(optimizer, *args, **kwargs)
            hooks.guarded(self._made.put, optimizer)

        hooks.replace(torch.optim.Optimizer, "__init__", noted)

    def versions(self) -> list[tuple[Any, int]]:
        """How often each one's parameters have been written to; the first and the last of a group tell."""
        return [
            (optimizer, sum(p._version for g in optimizer.param_groups for p in (*g["params"][:1], *g["params"][-1:])))
            for optimizer in self._made
        ]


def _raise_later(thread: int, problem: BaseException) -> None:
    """Raise an exception in a thread a moment from now, from another thread: here and now it would be lost."""
    kind: Any = type(problem) if not hasattr(problem, "_flatout_again") else type(problem).__base__

    class Again(kind):  # type: ignore[misc]
        _flatout_again = True

        def __init__(self) -> None:
            BaseException.__init__(self, *problem.args)
            self.__dict__.update(problem.__dict__)
            if isinstance(problem, SystemExit):
                self.code = problem.code

    Again.__name__ = Again.__qualname__ = kind.__name__
    Again.__module__ = kind.__module__
    deliver = ctypes.pythonapi.PyThreadState_SetAsyncExc
    Timer(_MOMENT_S, deliver, (ctypes.c_ulong(thread), ctypes.py_object(Again))).start()


def _depth(frame: FrameType | None) -> int:
    """How many calls led to this one."""
    depth = 0
    while frame is not None:
        depth, frame = depth + 1, frame.f_back
    return depth


def _is_called_by_like(frame: FrameType, calls: int) -> bool:
    """Whether the caller so many calls above is one of its own kind."""
    above: FrameType | None = frame
    for _ in range(calls):
        above = above.f_back if above is not None else None
    return calls > 0 and above is not None and above.f_code is frame.f_code


def _our_code() -> Iterable[CodeType]:
    """The code of every function that runs in the training thread: the compiler need not look into it."""
    ours = [m for name, m in list(sys.modules.items()) if name.startswith("flatout.inside.")]
    waiting = [
        function.__code__
        for module in ours
        for thing in vars(module).values()
        for function in (vars(thing).values() if isinstance(thing, type) else (thing,))
        if isinstance(function, FunctionType)
    ]
    while waiting:
        code = waiting.pop()
        waiting += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        yield code
