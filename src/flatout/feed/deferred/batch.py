"""A batch whose transforms are still to be computed: to the loop a host tensor, on its way to a GPU the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flatout.feed.deferred.expression import LazyObject
from flatout.feed.deferred.program import TransformProgram, run_program

# What a placeholder can answer without its values.
_SHAPE = {"shape", "size", "dim", "ndim", "numel", "nelement", "__len__"}
_TYPE = {"dtype", "itemsize", "element_size", "is_floating_point", "is_complex", "is_quantized", "is_conj", "is_neg"}
_PLACE = {"device", "layout", "is_cuda", "is_meta", "is_mkldnn", "is_nested", "is_sparse"}
_OTHER = {"requires_grad", "is_leaf", "grad", "grad_fn", "names", "__hash__"}
_NEEDS_NO_VALUES = _SHAPE | _TYPE | _PLACE | _OTHER


class PlaceholderTensor(Tensor):
    """A tensor of known shape and type without values yet. Any call that a subclass cannot record computes them."""

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, *_: Any) -> Any:
        return Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype)

    def materialize(self) -> Tensor:
        """The real tensor on the host; from now on this object stands for it."""
        raise NotImplementedError

    def materialized(self) -> Tensor | None:
        """The real tensor, if it has been computed."""
        raise NotImplementedError

    @staticmethod
    def stack_lazily(samples: Sequence[Any], stack: Callable[..., Tensor], place: Callable[..., Tensor]) -> Any:
        """A deferred batch of samples that are not computed yet, or None where they have to be."""
        return None

    @classmethod
    def record(cls, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a call that needs no values; else NotImplemented."""
        return NotImplemented

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        args = tuple(arg.materialize() if isinstance(arg, LazyObject) else arg for arg in args)
        name: str = getattr(func, "__name__", "")
        if name == "__get__":
            name = func.__self__.__name__  # type: ignore[attr-defined]
        with torch._C.DisableTorchFunctionSubclass():
            lazy = bool(args) and isinstance(args[0], PlaceholderTensor) and args[0].materialized() is None
            if name in _NEEDS_NO_VALUES and lazy:
                return func(*args, **kwargs)
            result = cls.record(name, args, kwargs)
            if result is not NotImplemented:
                return result
            return func(*materialize(args), **materialize(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*materialize(args), **materialize(kwargs or {}))  # calls from inside torch

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.materialize().__reduce_ex__(protocol)


def materialize(thing: Any) -> Any:
    """The same with everything lazy in it computed: arguments of a call, in lists, tuples and dicts."""
    if isinstance(thing, LazyObject | PlaceholderTensor):
        return thing.materialize()
    if type(thing) in (list, tuple):
        return type(thing)(materialize(part) for part in thing)
    if type(thing) is dict:
        return {key: materialize(part) for key, part in thing.items()}
    return thing


class DeferredBatch(PlaceholderTensor):
    """A batch as workers leave it: decoded pixels, a row of numbers a sample, and the program to run on them."""

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, program: TransformProgram, pixels: Tensor, numbers: Tensor
    ):
        self.program, self.pixels, self.numbers = program, pixels, numbers
        self._result: Tensor | None = None

    @classmethod
    def of(cls, program: TransformProgram, pixels: Tensor, numbers: Tensor) -> Any:
        """The batch that this program makes of these pixels."""
        return cls((len(pixels), *program.shape), program.dtype, program, pixels, numbers)

    def parts(self) -> tuple[TransformProgram, Tensor, Tensor]:
        """The arguments that `of` takes."""
        return self.program, self.pixels, self.numbers

    def materialize(self) -> Tensor:
        """The values on the host, for a loop that looks at them there and may change them."""
        if self._result is None:
            with torch.inference_mode(False), torch.no_grad():
                self._result = run_program(self.program, self.pixels, self.numbers)
        return self._result

    def materialized(self) -> Tensor | None:
        """The values, if the loop has looked at them on the host."""
        return self._result

    @classmethod
    def record(cls, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Moves, pins and describes the batch without computing it on the host."""
        batch = args[0] if args else None
        if not isinstance(batch, cls):
            return NotImplemented
        if name == "_version":  # values that were seen on the host may have been changed there
            return 0 if batch._result is None else 1 + batch._result._version
        if batch._result is not None:
            return NotImplemented
        if name == "is_pinned":
            return batch.pixels.is_pinned()
        if name == "pin_memory":
            return cls.of(batch.program, batch.pixels.pin_memory(), batch.numbers.pin_memory())
        if name == "contiguous" and len(args) == 1 and not kwargs:
            return batch
        if name in ("stride", "is_contiguous"):  # those of any stacked batch
            return getattr(Tensor, name)(*args, **kwargs)
        return batch._moved(name, args[1:], kwargs)

    def _moved(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result on the GPU that `.to()` or `.cuda()` names; else NotImplemented."""
        device = _requested_device(name, args, kwargs)
        if device is None or device.type == "cpu":
            return NotImplemented
        blocking = not any(arg is True for arg in (*args, kwargs.get("non_blocking")))
        pixels = self.pixels.to(device, non_blocking=not blocking)
        numbers = self.numbers.to(device, non_blocking=not blocking)
        while _on_first_use:
            _on_first_use.pop()()
        result = _run_on_device(self.program, pixels, numbers)
        return result.to(*args, **kwargs) if name == "to" else result


def _requested_device(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    if name == "cuda":
        wanted = kwargs.get("device", args[0] if args else None)
        return torch.device("cuda", wanted) if isinstance(wanted, int) else torch.device(wanted or "cuda")
    if name != "to":
        return None
    wanted = kwargs.get("device", kwargs.get("other", args[0] if args else None))
    if isinstance(wanted, Tensor):
        return wanted.device
    if isinstance(wanted, int) and not isinstance(wanted, bool):
        return torch.device("cuda", wanted)
    return torch.device(wanted) if isinstance(wanted, str | torch.device) else None


_run_on_device: Callable[[TransformProgram, Tensor, Tensor], Tensor] = run_program


def run_on_device_with(run: Callable[[TransformProgram, Tensor, Tensor], Tensor]) -> None:
    """Run programs on a GPU with this function from now on."""
    global _run_on_device
    _run_on_device = run


_on_first_use: list[Callable[[], None]] = []


def call_on_first_use(call: Callable[[], None]) -> None:
    """Call this once, when transforms run on a GPU for the first time."""
    _on_first_use[:] = [call]
