"""Every attribute of Python, PyTorch or a library that flatout replaces: one table, one wrapper for each.

To see or change a call, subscribe to it at a stage:

    script ─► TIME (the recorder) ─► OBSERVE (fingerprints, lists of modules) ─► CHANGE (a plan's changes) ─► original

A subscriber that raises is switched off and reported once; the script's call goes through. When the
last one of an attribute leaves, the original is put back. Nothing here imports torch.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from enum import IntEnum
from types import ModuleType
from typing import Any, NamedTuple

from flatout.inside.recorder import BACKWARD, CHECKPOINT, COPY, DATA, LOGGING, OPTIMIZER, START, SYNC
from flatout.model.frameworks import FRAMEWORKS

Call = Callable[..., Any]

RECORDING, PLAN, PROOF, TRIAL = "a recording", "a plan", "a proof", "a trial"
FIRST_STEPS = "steps 2 to 4 of a recording"


class Stage(IntEnum):
    """How close to the original call a subscriber is."""

    CHANGE = 0
    OBSERVE = 1
    TIME = 2


class Patch(NamedTuple):
    """Attributes of one owner that are replaced for the same reason, and what has to be going on for that.

    `phase` is what the recorder calls the time of a call; what `computes` is timed in few steps only.
    `library` may never be imported.
    """

    owner: str
    names: str
    why: str
    when: str = RECORDING
    phase: str = ""
    computes: bool = False
    library: str = ""

    @property
    def attributes(self) -> list[str]:
        """Their full names."""
        return [f"{self.owner}.{name}" for name in self.names.split()]


_DATALOADER = "torch.utils.data.dataloader"
_LOADER, _ITERATOR = f"{_DATALOADER}.DataLoader", f"{_DATALOADER}._BaseDataLoaderIter"
_MODULE = "torch.nn.modules.module.Module"
_OPTIMIZER = "torch.optim.optimizer.Optimizer"
_BOARD, _WANDB = "torch.utils.tensorboard.writer", "wandb.sdk.wandb_run"
_SAFE, _SPREAD = "safetensors.torch", "torch.distributed.checkpoint"
_READS = "item tolist numpy cpu __bool__ __float__ __int__ __index__ __repr__ __format__"
_LOGS = "add_scalar add_scalars add_histogram add_image add_images add_figure add_text flush"
_BY_HAND = "attention written out by hand, where nothing is compiled"
_ENDS_LOOKING = "looking for attention ends before anything is compiled"
_CLIPS = "clip_grad_norm_ clip_grad_value_"


def _saved_by_frameworks() -> Iterator[Patch]:
    """What frameworks do to write a checkpoint: more than the call of torch in the middle of it."""
    for where in (name for framework in FRAMEWORKS for name in framework.saves):
        owner, _, name = where.rpartition(".")
        library = owner.rpartition(".")[0]
        yield Patch(owner, name, "the time of checkpoints", phase=CHECKPOINT, library=library)


TABLE: tuple[Patch, ...] = (
    Patch(_LOADER, "__iter__", "a pass over the data begins", phase=START),
    Patch(_ITERATOR, "__next__", "waiting for data; a batch that is there"),
    Patch(f"{_DATALOADER}._DatasetKind", "create_fetcher", "what loading samples takes, in each worker"),
    Patch("queue.Queue", "get", "waiting for data from a thread of the script's"),
    Patch("concurrent.futures._base.Future", "result", "waiting for data from a thread", phase=DATA),
    Patch(_MODULE, "__init__ __setstate__", "a list of all modules, to find the model"),
    Patch(_MODULE, "compile", "what the script compiles by itself"),
    Patch("torch", "compile", "what the script compiles by itself; the time of compiled functions"),
    Patch("torch.autograd", "backward", "the time of the backward pass; the loss"),
    Patch("torch.autograd", "grad", "the time of the backward pass", phase=BACKWARD, computes=True),
    Patch("torch.autocast", "__enter__", "which mixed precision is in force"),
    Patch(_OPTIMIZER, "__init__", "a list of all optimizers; fused=True"),
    Patch(_OPTIMIZER, "zero_grad", "the time of the optimizer", phase=OPTIMIZER, computes=True),
    Patch("torch.nn.utils", _CLIPS, "the time of the optimizer", phase=OPTIMIZER, computes=True),
    Patch("torch.nn.utils.clip_grad", _CLIPS, "the time of the optimizer", phase=OPTIMIZER, computes=True),
    Patch("torch.amp.grad_scaler.GradScaler", "step", "steps that are skipped"),
    Patch("torch.Tensor", "to", "copies to the GPU; a copy that is there already"),
    Patch("torch.Tensor", "cuda", "copies to the GPU; a copy that is there already", phase=COPY, computes=True),
    Patch("torch.Tensor", "pin_memory copy_", "copies to the GPU", phase=COPY, computes=True),
    Patch("torch.Tensor", _READS, "waiting for the GPU, with the line of the script", phase=SYNC),
    Patch("torch", "softmax", _BY_HAND, FIRST_STEPS),
    Patch("torch.Tensor", "softmax", _BY_HAND, FIRST_STEPS),
    Patch("torch.nn.functional", "softmax", _BY_HAND, FIRST_STEPS),
    Patch("torch.jit._script", "get_jit_def", _ENDS_LOOKING, FIRST_STEPS),
    Patch("torch.jit._recursive", "get_jit_def", _ENDS_LOOKING, FIRST_STEPS),
    Patch("torch.Tensor", "__array__ __dlpack__", "memory that is handed out: no copy of it is valid", PLAN),
    Patch("torch.cuda", "synchronize", "waiting for the GPU", phase=SYNC),
    Patch("torch.cuda.streams.Event", "synchronize", "waiting for the GPU", phase=SYNC),
    Patch("torch.cuda.streams.Stream", "synchronize", "waiting for the GPU", phase=SYNC),
    Patch("torch", "save", "the time of checkpoints", phase=CHECKPOINT),
    Patch(_SAFE, "save_file", "the time of checkpoints", phase=CHECKPOINT, library=_SAFE),
    Patch(_SPREAD, "save", "the time of checkpoints", phase=CHECKPOINT, library=_SPREAD),
    *_saved_by_frameworks(),
    Patch("builtins", "print", "the time of logging", phase=LOGGING),
    Patch("logging.Logger", "callHandlers", "the time of logging", phase=LOGGING),
    Patch(f"{_BOARD}.SummaryWriter", _LOGS, "the time of logging", phase=LOGGING, library=_BOARD),
    Patch(f"{_WANDB}.Run", "log", "the time of logging", phase=LOGGING, library=_WANDB),
    Patch("tqdm.std.tqdm", "refresh", "the time of logging", phase=LOGGING, library="tqdm.std"),
    Patch("sys", "unraisablehook", "a signal during a garbage collection still reaches the script"),
    Patch("os", "_exit", "the trace is completed first"),
    Patch(_LOADER, "__init__", "num_workers, pin_memory and so on are changed", PLAN),
    Patch(_LOADER, "_get_iterator", "flatout's loader, copies ahead of time", PLAN),
    Patch("torch.utils.data._utils.worker", "_worker_loop", "the number of threads in a worker", PLAN),
    Patch(_LOADER, "_index_sampler", "which samples are asked for", PROOF),
    Patch("numpy.random", "default_rng", "a seed where the script sets none", TRIAL),
)
"""What goes through this layer."""

ELSEWHERE: tuple[Patch, ...] = (
    Patch("argparse.ArgumentParser", "parse_known_args", "the script's settings; a plan's values for them"),
    Patch("yaml", "load", "the script's settings; a plan's values for them"),
    Patch("json", "load", "the script's settings; a plan's values for them"),
    Patch("sys", "meta_path", "what is imported"),
    Patch("gc", "callbacks", "the time of garbage collections"),
    Patch("importlib.machinery.SourceFileLoader", "get_code", "a plan's values in Python config modules", PLAN),
    Patch("torch.autograd.profiler.profile", "_prepare_trace", "the X-ray gives way to a profiler", "an X-ray"),
    Patch("sys.modules", "torch._dynamo", "the compiler is loaded only when it is used", TRIAL),
    Patch("os, io, shutil", "open rename remove …", "the trial's files are kept apart", "a trial without an overlay"),
    Patch("a model", "_compiled_call_impl", "the time of the forward pass; what a plan changes around it"),
    Patch("an optimizer", "step", "steps with infinite gradients are left out, with fp16", PLAN),
)
"""What is replaced in other ways: before torch is imported, for a moment, or on one object."""

_WHERE = {name: patch for patch in TABLE for name in patch.attributes}


class PatchPoint:
    """One attribute: its original, who subscribed to it, and the wrapper that stands there."""

    __slots__ = ("_built", "_handlers", "_name", "_owner", "_raw", "_time", "call", "original")

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._name = owner, name
        self._raw = vars(owner).get(name)  # None where it is inherited
        self.original: Call = getattr(owner, name)
        if isinstance(self._raw, property):
            self.original = self._raw.fget  # type: ignore[assignment]
        self.call = self.original  # what a wrapper calls
        self._handlers: list[tuple[Subscriber, Call]] = []
        self._time: Subscriber | None = None
        self._built: Any = None

    @property
    def stands(self) -> bool:
        """Whether our wrapper is what the attribute is now; somebody may have put theirs on top of it."""
        return self._built is not None and vars(self._owner).get(self._name) is self._built

    def add(self, subscriber: Subscriber, handler: Call) -> None:
        """One more subscriber; the later of one stage is the outer one."""
        self._handlers.append((subscriber, handler))
        self._handlers.sort(key=lambda entry: entry[0].stage)
        self._compose()
        if self._built is None:
            self._put(_passing(self))

    def add_time(self, subscriber: Subscriber, build: Callable[[PatchPoint], Call]) -> None:
        """The recorder's own wrapper, which calls all others: training can afford no second one."""
        self._time = subscriber
        self._put(build(self))

    def remove(self, subscriber: Subscriber) -> None:
        """Without this one; the original is put back after the last."""
        self._handlers = [entry for entry in self._handlers if entry[0] is not subscriber]
        self._compose()
        if self._time is subscriber:
            self._time = None
        if not self.stands or self._time is not None:
            return
        if self._handlers:
            self._put(_passing(self))
            return
        self._built = None
        if self._raw is None:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._raw)

    def _compose(self) -> None:
        self.call = self.original
        for _, handler in self._handlers:
            self.call = functools.partial(handler, self.call)

    def _put(self, wrapper: Any) -> None:
        functools.update_wrapper(wrapper, self.original)
        wrapper.flatout_original = self.original
        if isinstance(self._raw, property | staticmethod):
            wrapper = type(self._raw)(wrapper)
        setattr(self._owner, self._name, wrapper)
        self._built = vars(self._owner)[self._name]


def _passing(point: PatchPoint) -> Call:
    """The wrapper where nothing is timed."""
    from torch.compiler import is_dynamo_compiling

    original = point.original

    def patched(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return original(*args, **kwargs)
        return point.call(*args, **kwargs)

    return patched


def _if_imported(name: str, action: Callable[[ModuleType], None]) -> None:
    if name in sys.modules:
        action(sys.modules[name])


class Patches:
    """The attributes that are replaced now."""

    def __init__(self) -> None:
        self._points: dict[str, PatchPoint] = {}
        # Calls an action once a library has been imported; `start` gives one that also waits for that.
        self.when_imported = _if_imported

    def subscriber(self, stage: Stage, fail: Callable[[Exception], None]) -> Subscriber:
        """A new one; `fail` is called once, with what it raised, after it was switched off."""
        return Subscriber(self, stage, fail)

    def point(self, where: str) -> PatchPoint | None:
        """The place of one; None where this version of a library has no such attribute."""
        point = self._points.get(where)
        if point is None or not point.stands:  # somebody has put theirs on top of ours
            owner, _, name = where.rpartition(".")
            holder = _resolve(owner)
            if getattr(holder, name, None) is None:
                return None
            point = self._points[where] = PatchPoint(holder, name)
        return point


class Subscriber:
    """One who sees or changes calls. What it raises switches it off; the script's own exceptions pass."""

    def __init__(self, patches: Patches, stage: Stage, fail: Callable[[Exception], None]) -> None:
        self.patches = patches
        self.stage = stage
        self._fail = fail
        self._undo: list[Callable[[], None]] = []
        self.off = False

    def around(self, where: str, handler: Call) -> None:
        """Have `handler(call, *args, **kwargs)` called instead; it keeps its own exceptions to itself."""
        self._join(where, lambda point: point.add(self, handler))

    def before(self, where: str, told: Call) -> None:
        """Have `told(*args, **kwargs)` called before each call."""

        def tell_and_call(call: Call, *args: Any, **kwargs: Any) -> Any:
            self.guarded(told, *args, **kwargs)
            return call(*args, **kwargs)

        self.around(where, tell_and_call)

    def after(self, where: str, told: Call) -> None:
        """Have `told(*args, **kwargs)` called after each call."""

        def call_and_tell(call: Call, *args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            self.guarded(told, *args, **kwargs)
            return result

        self.around(where, call_and_tell)

    def time(self, where: str, build: Callable[[PatchPoint], Call]) -> None:
        """Have `build(point)` make the wrapper, which calls `point.call`."""
        self._join(where, lambda point: point.add_time(self, build))

    def _join(self, where: str, add: Callable[[PatchPoint], None]) -> None:
        """Subscribe to an attribute, once its library has been imported."""
        if where not in _WHERE:
            raise KeyError(f"{where} is not in the table of patches")

        def join(_: object = None) -> None:
            point = None if self.off else self.patches.point(where)
            if point is not None:
                add(point)
                self.on_leaving(lambda: point.remove(self))

        library = _WHERE[where].library
        if library:
            self.patches.when_imported(library, join)
        else:
            join()

    def on_leaving(self, undo: Callable[[], None]) -> None:
        """What to do when this one leaves."""
        self._undo.append(undo)

    def guarded(self, function: Call, *args: Any, **kwargs: Any) -> Any:
        """Call something of this subscriber's: what it raises ends the subscriber, not the run."""
        try:
            return function(*args, **kwargs)
        except Exception as problem:
            self.failed(problem)
            return None

    def failed(self, problem: Exception) -> None:
        """Something went wrong: switch this subscriber off, and say so once."""
        if not self.off:
            self.leave()
            with suppress(Exception):
                self._fail(problem)

    def leave(self) -> None:
        """See no more calls."""
        self.off = True
        while self._undo:
            self._undo.pop()()


def original(function: Any) -> Any:
    """What one of our wrappers stands for; any other function itself."""
    return getattr(function, "flatout_original", function)


def rows() -> list[tuple[str, str, str]]:
    """The tables as text: what is replaced, in what, and why."""
    return [
        (f"{patch.owner}: {', '.join(patch.names.split())}", patch.when, patch.why) for patch in (*TABLE, *ELSEWHERE)
    ]


def _resolve(path: str) -> Any:
    """What a full name stands for; None where its module has not been imported or has no such thing."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        thing: Any = sys.modules.get(".".join(parts[:length]))
        if thing is not None:
            for name in parts[length:]:
                thing = getattr(thing, name, None)
            return thing
    return None
