"""The patches on torch and a few libraries: they tell a Recorder what the training thread does.

Everything is put on classes and modules, so that earlier imports, subclasses and isinstance keep working, and
everything can be taken off again. A hook that raises is noted once, all hooks come off, and the user's call goes
through as if we had never been there.
"""

from __future__ import annotations

import builtins
import functools
import gc
import logging
import os
import queue
import sys
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.utils.data.dataloader as stock
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from flatout.sense.recorder import CHECKPOINT, COPY, GC, LOGGING, OPTIMIZER, OWN, START, SYNC, Recorder

# Methods that make the host wait for the card, where the tensor is on one.
SYNC_METHODS = ("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__repr__", "__format__")
_LOG_METHODS = {
    "torch.utils.tensorboard.writer": (
        "SummaryWriter",
        ("add_scalar", "add_scalars", "add_histogram", "add_image", "add_images", "add_figure", "add_text", "flush"),
    ),
    "wandb.sdk.wandb_run": ("Run", ("log",)),
    "tqdm.std": ("tqdm", ("refresh",)),
}
_SAVE_FUNCTIONS = {"safetensors.torch": ("save_file",), "torch.distributed.checkpoint": ("save",)}
_OURS = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)


class Hooks:
    """Installs the patches around one Recorder, and takes them off again."""

    def __init__(self, recorder: Recorder, listener: Listener, fail: Callable[[BaseException], None]) -> None:
        self._recorder = recorder
        self._listener = listener
        self._tell = fail
        self._undo: list[Callable[[], None]] = []
        self._roots = _Roots(self)
        self.off = False

    def install(self) -> None:
        """Put every patch in place."""
        self._data()
        self._compute()
        self._copies()
        self._waits()
        self._pauses()

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
                self.around(getattr(module, owner, None), method, lambda *_: LOGGING)
        for function in _SAVE_FUNCTIONS.get(name, ()):
            self.around(module, function, lambda *_: CHECKPOINT)

    LIBRARIES = (*_LOG_METHODS, *_SAVE_FUNCTIONS)

    # -- what the wrappers are made of ------------------------------------------------------------------------------

    def around(self, owner: Any, name: str, phase: Callable[..., str | None]) -> None:
        """Time `owner.name` as the phase that `phase(*arguments)` names; None lets the call pass untimed."""
        original = getattr(owner, name, None)
        if original is None:
            return
        recorder = self._recorder

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self.off or recorder.is_elsewhere() or torch.compiler.is_compiling():
                return original(*args, **kwargs)
            try:
                named = phase(*args, **kwargs)
                if named is not None:
                    recorder.push(named, caller() if named == SYNC else None)
            except Exception as problem:
                self.fail(problem)
                named = None
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
        setattr(owner, name, new)
        self._undo.append(lambda: setattr(owner, name, old) if had else delattr(owner, name))

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
        build = stock.DataLoader._get_iterator

        @functools.wraps(fetch)
        def next_batch(iterator: Any) -> Any:
            if self.off or recorder.is_elsewhere():
                return fetch(iterator)
            loader = getattr(iterator, "_flatout_loader", id(iterator))
            self.guarded(recorder.fetching, loader)
            samples = None
            try:
                batch = self.guarded(listener.replayed_batch, loader)
                if batch is None:
                    batch = fetch(iterator)
                    self.guarded(listener.fetched, loader, batch)
                samples = self.guarded(batch_size, batch) or 0
                return batch
            finally:
                if not self.off:
                    self.guarded(recorder.fetched, samples)

        @functools.wraps(build)
        def get_iterator(loader: Any) -> Any:
            iterator: Any = build(loader)
            if not self.off:
                iterator._flatout_loader = id(loader)
                self.guarded(listener.loader_seen, loader)
            return iterator

        self.replace(stock._BaseDataLoaderIter, "__next__", next_batch)
        self.replace(stock.DataLoader, "_get_iterator", get_iterator)
        self.around(stock.DataLoader, "__iter__", lambda *_: START)
        # A thread of the user's that prefetches hands its batches over by such a queue.
        self.around(queue.Queue, "get", lambda q, *_, **__: "data" if not recorder.busy and q.empty() else None)

    # -- forward, backward, optimizer -------------------------------------------------------------------------------

    def _compute(self) -> None:
        recorder, listener = self._recorder, self._listener
        self._roots.watch()
        backward = torch.autograd.backward

        @functools.wraps(backward)
        def run_backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if self.off or recorder.is_elsewhere() or torch.compiler.is_compiling():
                return backward(tensors, *args, **kwargs)
            self.guarded(listener.backward_begins, tensors)
            try:
                return backward(tensors, *args, **kwargs)
            finally:
                if not self.off:
                    self.guarded(recorder.pop)

        self.replace(torch.autograd, "backward", run_backward)
        self.around(torch.autograd, "grad", lambda *_, **__: "backward")
        self.around(torch.optim.Optimizer, "zero_grad", lambda *_, **__: OPTIMIZER)
        self._optimizer_steps()

    def _optimizer_steps(self) -> None:
        recorder, listener = self._recorder, self._listener

        def before(optimizer: Any, *_: Any) -> None:
            if not self.off and not recorder.is_elsewhere() and not torch.compiler.is_compiling():
                self.guarded(recorder.optimizer_begins)

        def after(optimizer: Any, *_: Any) -> None:
            if self.off or torch.compiler.is_compiling():
                return
            if recorder.is_elsewhere():
                recorder.move_here()
            if self.guarded(recorder.optimizer_ends, id(optimizer)):
                if self._roots.looking:
                    recorder.push(OWN)
                    self.guarded(self._roots.find, optimizer)
                    recorder.pop()
                listener.step_ended(optimizer)

        for handle in (register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)):
            self._undo.append(handle.remove)

        from torch.amp.grad_scaler import GradScaler

        scaler_step = GradScaler.step

        @functools.wraps(scaler_step)
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            steps = recorder.steps
            result = scaler_step(scaler, optimizer, *args, **kwargs)
            if not self.off and recorder.steps == steps and not recorder.is_elsewhere() and result is None:
                self.guarded(recorder.end_step)  # infinities found: the optimizer was left out, the step is over
            return result

        self.replace(GradScaler, "step", step)

    # -- copies, and waiting for the card ---------------------------------------------------------------------------

    def _copies(self) -> None:
        listener = self._listener

        def moving(tensor: Any, *args: Any, **kwargs: Any) -> str | None:
            if tensor.is_cuda:
                return SYNC if _names_cpu(args, kwargs) else None
            return COPY if on_card_possible() and _names_card(args, kwargs) else None

        self.around(torch.Tensor, "to", moving)
        self.around(torch.Tensor, "cuda", lambda t, *_, **__: None if t.is_cuda else COPY)
        self.around(torch.Tensor, "pin_memory", lambda t, *_, **__: COPY if on_card_possible() else None)
        self.around(torch.Tensor, "copy_", lambda t, s, *_, **__: COPY if crosses(t, s) else None)
        for name in ("to", "cuda"):
            self._remember(torch.Tensor, name, listener)

    def _remember(self, owner: Any, name: str, listener: Listener) -> None:
        """Let a trial answer with the device copy it made before (see Listener.resident_copy)."""
        timed = getattr(owner, name)

        @functools.wraps(timed)
        def maybe_resident(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if not listener.resident:
                return timed(tensor, *args, **kwargs)
            return listener.resident_copy(tensor, functools.partial(timed, tensor, *args, **kwargs))

        self.replace(owner, name, maybe_resident)

    def _waits(self) -> None:
        for name in SYNC_METHODS:
            self.around(torch.Tensor, name, lambda t, *_, **__: SYNC if on_card(t) else None)
        self.around(torch.Tensor, "cpu", lambda t, *_, **__: SYNC if on_card(t) else None)
        self.around(torch.cuda, "synchronize", lambda *_, **__: SYNC)
        self.around(torch.cuda.Event, "synchronize", lambda *_, **__: SYNC)
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
            if info["generation"] == 2 and not self.off and not recorder.is_elsewhere():
                self.guarded(functools.partial(recorder.push, GC) if phase == "start" else recorder.pop)

        gc.callbacks.append(collecting)
        self._undo.append(lambda: gc.callbacks.remove(collecting))


class Listener:
    """What the session wants to know beside times; the defaults want nothing."""

    resident = False

    def loader_seen(self, loader: Any) -> None:
        """A DataLoader has built an iterator."""

    def fetched(self, loader: int, batch: Any) -> None:
        """A batch has come out of a loader."""

    def replayed_batch(self, loader: int) -> Any:
        """A batch to give instead of fetching one, or None."""

    def resident_copy(self, tensor: Any, copy: Callable[[], Any]) -> Any:
        """The device copy of `tensor`, made by `copy` the first time."""
        return copy()

    def backward_begins(self, tensors: Any) -> None:
        """A backward pass is about to run; has to open its phase."""

    def step_ended(self, optimizer: Any) -> None:
        """A training step is over. May raise to end the run."""


class _Roots:
    """Finds the modules the user calls, and times those calls only.

    Every module made is noted (weakly). After the first step the ones that are part of no other are wrapped through
    `_compiled_call_impl`, which pickling and copying leave out, and which works around a compiled module from the
    outside. If none of them is ever called (a LightningModule calls its parts), their children are wrapped instead.
    """

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks
        self._made: weakref.WeakSet[Any] = weakref.WeakSet()
        self._wrapped: weakref.WeakSet[Any] = weakref.WeakSet()
        self._calls = 0
        self._depth = 0
        self._looks = 0
        self._trained: set[int] = set()

    def watch(self) -> None:
        init = torch.nn.Module.__init__
        made = self._made

        @functools.wraps(init)
        def noted(module: Any, *args: Any, **kwargs: Any) -> None:
            init(module, *args, **kwargs)
            made.add(module)

        self._hooks.replace(torch.nn.Module, "__init__", noted)
        for thing in gc.get_objects():
            if issubclass(type(thing), torch.nn.Module):  # isinstance would wake up lazy objects
                made.add(thing)

    @property
    def looking(self) -> bool:
        """Whether `find` is to be called after this step."""
        return self._looks <= 3

    def find(self, optimizer: Any) -> None:
        """Called after the first steps, a few times in case models come late."""
        self._looks += 1
        self._trained |= {id(p) for group in optimizer.param_groups for p in group["params"]}
        modules = [m for m in list(self._made) if any(True for _ in m.parameters(recurse=True))]
        parts = {id(child) for m in modules for child in m.children()}
        tops = [m for m in modules if id(m) not in parts]
        if self._looks > 2 and self._calls == 0:
            tops = [part for top in tops for part in _called_parts(top)]
        for module in tops:
            if module not in self._wrapped:
                self._wrap(module)

    def _wrap(self, module: Any) -> None:
        inner = vars(module).get("_compiled_call_impl")
        call = inner if inner is not None else module._call_impl
        recorder, hooks = self._hooks._recorder, self._hooks
        trained = any(id(p) in self._trained for p in module.parameters())
        me = weakref.ref(module)

        def timed_call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or hooks.off or self._depth or recorder.is_elsewhere():
                return call(*args, **kwargs)
            self._calls += 1
            owner = me()
            learns = torch.is_grad_enabled() or not trained
            hooks.guarded(
                functools.partial(recorder.forward, learns=learns, training=owner is None or bool(owner.training))
            )
            self._depth += 1
            try:
                return call(*args, **kwargs)
            finally:
                self._depth -= 1
                if not hooks.off:
                    hooks.guarded(recorder.pop)

        vars(module)["_compiled_call_impl"] = timed_call
        self._wrapped.add(module)
        hooks._undo.append(functools.partial(_unwrap, me, inner))


def _unwrap(module: weakref.ref[Any], inner: Any) -> None:
    owner = module()
    if owner is None:
        return
    if inner is None:
        vars(owner).pop("_compiled_call_impl", None)
    else:
        vars(owner)["_compiled_call_impl"] = inner


def _called_parts(module: Any) -> Iterable[Any]:
    """The modules right below, looking through lists and dicts of modules, which are never called themselves."""
    for child in module.children():
        if isinstance(child, torch.nn.ModuleList | torch.nn.ModuleDict):
            yield from child.children()
        else:
            yield child


def batch_size(batch: Any) -> int | None:
    """How many samples a batch holds: the length of the first tensor or list found in it."""
    if isinstance(batch, torch.Tensor):
        return int(batch.shape[0]) if batch.dim() else 1
    if isinstance(batch, dict) or hasattr(batch, "keys"):
        return next((n for key in batch for n in [batch_size(batch[key])] if n is not None), None)
    if isinstance(batch, list | tuple):
        found = next((n for item in batch for n in [batch_size(item)] if n is not None), None)
        return found if found is not None else (len(batch) if isinstance(batch, list) else None)
    return None


def on_card(tensor: Any) -> bool:
    """Whether reading this tensor makes the host wait for a GPU."""
    return bool(tensor.is_cuda)


def on_card_possible() -> bool:
    """Whether CUDA is in use at all in this process."""
    return bool(torch.cuda.is_initialized())


def crosses(target: Any, source: Any) -> bool:
    """Whether a copy goes from the host to a card."""
    return bool(target.is_cuda) and isinstance(source, torch.Tensor) and not source.is_cuda


def _names_card(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    target = kwargs.get("device", args[0] if args else None)
    if isinstance(target, torch.Tensor):
        return bool(target.is_cuda)
    return isinstance(target, int) or str(target).startswith("cuda")


def _names_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return str(kwargs.get("device", args[0] if args else None)) == "cpu"


@functools.lru_cache(maxsize=4096)
def _place(filename: str) -> str | None:
    """How a file is named in a report; None for torch's and our own."""
    if filename.startswith((_OURS, _TORCH, "<")):
        return None
    try:
        return os.path.relpath(filename) if filename.startswith(str(Path.cwd())) else filename
    except (OSError, ValueError):
        return filename


def caller() -> str | None:
    """The user's file:line that led here."""
    frame: FrameType | None = sys._getframe(2)
    outermost = None
    while frame is not None:
        place = _place(frame.f_code.co_filename)
        if place is not None:
            if "site-packages" not in place and "/lib/python" not in place:
                return f"{place}:{frame.f_lineno}"
            outermost = outermost or f"{place}:{frame.f_lineno}"
        frame = frame.f_back
    return outermost
