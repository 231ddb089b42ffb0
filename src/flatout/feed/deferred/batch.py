"""A batch whose transforms are still to be computed: to the loop a host tensor, on its way to a GPU
the result.

Recorded transforms are data, a `TransformProgram`: operations that run for a whole batch at once, on any
device. They are the same for all samples of a batch; what differs from sample to sample (an angle, a
brightness) is a row of numbers. Where one sample's picture was rotated and another's was not, both are
warped: by nothing, for one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_map

# How pixels are moved; a later way can do what an earlier one does: nothing moves, pixels swap
# places, the nearest pixel is taken, or pixels are interpolated.
MOVES = ("same", "swap", "nearest", "bilinear")
WARP_NUMBERS = 6  # the rows of an affine matrix; the colour of what lies outside follows
_MAX_COMPILED = 4  # images, masks, and what random branches make of them
_ROUND_UP = 5e-5  # of a gray level and the picture's length: values are truncated, and 99.99 is meant to be 100
_compile = torch.compile  # taken before anything wraps it to time it


# --- programs -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TransformStep:
    """One operation on the results of earlier steps. `static` is what is the same in every sample."""

    op: str
    inputs: tuple[int, ...] = ()
    static: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class TransformProgram:
    """Steps in order, the last of which is the result; shape and type are those of one sample."""

    steps: tuple[TransformStep, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def is_identity(self) -> bool:
        """Whether the result is just the decoded pixels."""
        return all(
            step.op in ("pixels", "copy") or (step.op == "warp" and step.static[0] == "same") for step in self.steps
        )


def merge_programs(programs: Sequence[TransformProgram]) -> TransformProgram | None:
    """One program that does for each sample what its own program does, or None."""
    first = programs[0]
    if any((len(p.steps), p.shape, p.dtype) != (len(first.steps), first.shape, first.dtype) for p in programs):
        return None
    steps = []
    for column in zip(*(program.steps for program in programs), strict=True):
        if all(step.op == "warp" for step in column):
            column = _with_one_move(column)
        if any(step != column[0] for step in column):
            return None
        steps.append(column[0])
    return replace(first, steps=tuple(steps))


def _with_one_move(warps: Sequence[TransformStep]) -> tuple[TransformStep, ...]:
    """The same warps, moving pixels alike where that is possible: where they only swap places."""
    move = max((step.static[0] for step in warps), key=MOVES.index)
    return tuple(
        replace(step, static=(move, *step.static[1:])) if step.static[0] in ("same", "swap") else step for step in warps
    )


def run_program(program: TransformProgram, pixels: Tensor, numbers: Tensor) -> Tensor:
    """The result for a batch: `pixels` as they were decoded, one row of `numbers` a sample."""
    numbers = numbers.to(torch.float32)
    results: list[Tensor] = []
    for step in program.steps:
        inputs = [results[position] for position in step.inputs]
        if step.op == "pixels":
            inputs = [pixels]
        elif step.op in ("numbers", "warp"):
            inputs.append(numbers)
        results.append(_OPS[step.op](*inputs, *step.static))
    return results[-1].to(program.dtype).contiguous()


class CompiledPrograms:
    """Runs programs as compiled kernels: step by step, each of some thirty steps reads and writes the
    whole batch.

    A program is compiled for the first batch size it meets; a smaller last batch runs step by step.
    """

    def __init__(self) -> None:
        self._compiled: dict[TransformProgram, tuple[torch.Size, Callable[[Tensor, Tensor], Tensor]]] = {}
        self.compile_s = 0.0

    @torch.no_grad()
    def __call__(self, program: TransformProgram, pixels: Tensor, numbers: Tensor) -> Tensor:
        if program not in self._compiled and len(self._compiled) < _MAX_COMPILED:
            return self._compile_and_run(program, pixels, numbers)
        shape, compiled = self._compiled.get(program, (None, None))
        if compiled is None or pixels.shape != shape:
            return run_program(program, pixels, numbers)
        return compiled(pixels, numbers)

    def _compile_and_run(self, program: TransformProgram, pixels: Tensor, numbers: Tensor) -> Tensor:
        def step_by_step(pixels: Tensor, numbers: Tensor) -> Tensor:
            return run_program(program, pixels, numbers)

        began = time.perf_counter()
        compiled = _compile(step_by_step, dynamic=False)
        try:
            result = compiled(pixels, numbers)
        except Exception:  # no working compiler; an error of the steps themselves is raised again below
            compiled = step_by_step
            result = step_by_step(pixels, numbers)
        self._compiled[program] = pixels.shape, compiled
        self.compile_s += time.perf_counter() - began
        return result


# --- operations: (*inputs, *static) ─► a tensor with the batch first ----------------------------


def _numbers(numbers: Tensor, start: int, shape: tuple[int, ...]) -> Tensor:
    count = torch.Size(shape).numel()
    return numbers[:, start : start + count].reshape(-1, *shape)


def _warp(source: Tensor, numbers: Tensor, move: str, start: int, colours: int) -> Tensor:
    """Each pixel from where the sample's matrix says, counted from the corner of the picture, as
    Pillow does."""
    if move == "same":
        return source
    batch, height, width = source.shape[:3]
    flat = source.reshape(batch, height, width, -1)
    matrix = numbers[:, start : start + WARP_NUMBERS].reshape(batch, 2, 3, 1)
    across = torch.arange(width, device=source.device, dtype=torch.float32) + 0.5
    down = torch.arange(height, device=source.device, dtype=torch.float32) + 0.5
    x, y = matrix[:, :, 0] * across, matrix[:, :, 1] * down + matrix[:, :, 2]
    from_x = x[:, 0, None, :] + y[:, 0, :, None]
    from_y = x[:, 1, None, :] + y[:, 1, :, None]
    if move == "bilinear":
        moved = _interpolate(flat, x, y)
    else:
        place = from_y.long().clamp(0, height - 1) * width + from_x.long().clamp(0, width - 1)
        place = place.reshape(batch, -1, 1).expand(-1, -1, flat.shape[-1])
        moved = flat.flatten(1, 2).gather(1, place).view_as(flat)
    inside = (from_x >= 0) & (from_x < width) & (from_y >= 0) & (from_y < height)
    end = start + WARP_NUMBERS
    colour = numbers[:, end : end + colours].reshape(batch, 1, 1, colours)
    return torch.where(inside.unsqueeze(-1), moved, colour.to(moved.dtype)).reshape(source.shape)


def _interpolate(pixels: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The value at x + y, in both directions, between the four pixels around it; truncated as Pillow does."""
    rows = []
    for row, length in enumerate((pixels.shape[2], pixels.shape[1])):  # from -1 to 1, as grid_sample counts
        rows.append(x[:, row, None, :] * (2 / length) + (y[:, row, :, None] * (2 / length) - 1))
    grid = torch.stack(rows, dim=-1)
    planes = pixels.permute(0, 3, 1, 2).float()
    moved = functional.grid_sample(planes, grid, mode="bilinear", padding_mode="border", align_corners=False)
    return moved.add_(_ROUND_UP * max(planes.shape[2:])).to(torch.uint8).permute(0, 2, 3, 1)


def _mean(source: Tensor) -> Tensor:
    return source.flatten(1).mean(1, dtype=torch.float64).float()  # exact where all pixels are equal


def _cast(source: Tensor, dtype: torch.dtype) -> Tensor:
    return source.to(torch.float32 if dtype == torch.float64 else dtype)  # float64 is slow on a GPU


def _elementwise(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def op(one: Tensor, other: Tensor) -> Tensor:
        dims = max(one.dim(), other.dim())
        return function(_with_dims(one, dims), _with_dims(other, dims))

    return op


def _with_dims(value: Tensor, dims: int) -> Tensor:
    """With that many dimensions: missing ones come right behind the batch, as in any broadcast of two
    samples."""
    return value.reshape(len(value), *[1] * (dims - value.dim()), *value.shape[1:])


_OPS: dict[str, Callable[..., Tensor]] = {
    "pixels": lambda pixels: pixels,
    "copy": lambda source: source,
    "numbers": _numbers,
    "warp": _warp,
    "mean": _mean,
    "permute": lambda source, *axes: source.permute(0, *(axis + 1 for axis in axes)),
    "expand": lambda source, axis: source.unsqueeze(axis + 1),
    "cast": _cast,
    "add": _elementwise(torch.add),
    "subtract": _elementwise(torch.subtract),
    "multiply": _elementwise(torch.multiply),
    "divide": _elementwise(torch.true_divide),
    "minimum": _elementwise(torch.minimum),
    "maximum": _elementwise(torch.maximum),
}


# --- tensors without values ---------------------------------------------------------------------

_NEEDS_NO_VALUES = frozenset((
    "shape", "size", "dim", "ndim", "numel", "nelement", "__len__", "dtype", "itemsize", "element_size", "is_complex",
    "is_floating_point", "is_quantized", "is_conj", "is_neg", "device", "layout", "is_cuda", "is_meta", "is_mkldnn",
    "is_nested", "is_sparse", "requires_grad", "is_leaf", "grad", "grad_fn", "names", "__hash__",
))  # fmt: skip


class PlaceholderTensor(Tensor):
    """A tensor of known shape and type without values yet, which `materialize` computes.

    So does any call but those for which `record` has a result that needs no values.
    """

    _real: Any = None
    materialize: Callable[[], Tensor]
    record: Callable[[str, tuple[Any, ...], dict[str, Any]], Any]

    @property
    def is_real(self) -> bool:
        """Whether its values have been computed."""
        return self._real is not None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name: str = getattr(func, "__name__", "")
        if name == "__get__":
            name = func.__self__.__name__  # type: ignore[attr-defined]
        with torch._C.DisableTorchFunctionSubclass():
            if args and isinstance(args[0], PlaceholderTensor):
                if name in _NEEDS_NO_VALUES and not args[0].is_real:
                    return func(*args, **kwargs)
                result = args[0].record(name, args[1:], kwargs)
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
    """The same with everything lazy in it computed: the arguments of a call, or a sample."""
    return tree_map(_materialized, thing)


def _materialized(part: Any) -> Any:
    return part.materialize() if hasattr(type(part), "materialize") else part


class DeferredBatch(PlaceholderTensor):
    """A batch as workers leave it: decoded pixels, a row of numbers a sample, and the program to run
    on them."""

    @staticmethod
    def __new__(cls, program: TransformProgram, pixels: Tensor, numbers: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, (len(pixels), *program.shape), dtype=program.dtype)

    def __init__(self, program: TransformProgram, pixels: Tensor, numbers: Tensor) -> None:
        self.program, self.pixels, self.numbers = program, pixels, numbers

    def parts(self) -> tuple[TransformProgram, Tensor, Tensor]:
        """The arguments that it was made with."""
        return self.program, self.pixels, self.numbers

    def materialize(self) -> Tensor:
        """The values on the host, for a loop that looks at them there and may change them."""
        if self._real is None:
            with torch.inference_mode(False), torch.no_grad():
                self._real = run_program(*self.parts())
        return self._real  # type: ignore[no-any-return]

    def record(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Moves, pins and describes the batch without computing it on the host."""
        if name == "_version":  # values that were seen on the host may have been changed there
            return 0 if self._real is None else 1 + self._real._version
        if self._real is not None:
            return NotImplemented
        if name == "is_pinned":
            return self.pixels.is_pinned()
        if name == "pin_memory":
            return DeferredBatch(self.program, self.pixels.pin_memory(), self.numbers.pin_memory())
        if name == "contiguous" and not args and not kwargs:
            return self
        if name in ("stride", "is_contiguous"):  # those of any stacked batch
            return getattr(Tensor, name)(self, *args, **kwargs)
        return self._moved(name, args, kwargs)

    def _moved(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result on the GPU that `.to()` or `.cuda()` names; else NotImplemented."""
        if name == "cuda":
            named = dict(zip(("device", "non_blocking"), args, strict=False)) | kwargs
            args, kwargs = (), named | {"device": "cuda" if named.get("device") is None else named["device"]}
        elif name != "to":
            return NotImplemented
        try:
            device, _, without_waiting, _ = torch._C._nn._parse_to(*args, **kwargs)
        except (TypeError, RuntimeError):  # `copy=True`, or a mistake of the script's, which the call will name
            return NotImplemented
        if device is None or device.type == "cpu":
            return NotImplemented
        pixels = self.pixels.to(device, non_blocking=without_waiting)
        numbers = self.numbers.to(device, non_blocking=without_waiting)
        while _on_first_use:
            _on_first_use.pop()()
        return _run_on_device(self.program, pixels, numbers).to(*args, **kwargs)


_run_on_device: Callable[[TransformProgram, Tensor, Tensor], Tensor] = run_program


def run_on_device_with(run: Callable[[TransformProgram, Tensor, Tensor], Tensor]) -> None:
    """Run programs on a GPU with this function from now on."""
    global _run_on_device
    _run_on_device = run


_on_first_use: list[Callable[[], None]] = []


def call_on_first_use(call: Callable[[], None]) -> None:
    """Call this once, when transforms run on a GPU for the first time."""
    _on_first_use[:] = [call]
