"""What the user holds: `Augment`, a list of operations; the presets; a `Schedule` of them over the epochs."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from . import batch_program
from . import operations as ops
from .batch_program import BatchProgram, draw, steps
from .operations import Operation, require

if TYPE_CHECKING:
    from .kernel_launch import KernelPlan

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Augment(nn.Module):
    """Operations on batches of uint8 images, with numbers drawn for each sample. Not differentiable.

    `index` is the place of each image in the data set: with the seed and the epoch it decides what a
    sample gets, whatever the batch, worker or rank it comes in. On CUDA a Triton kernel does the work,
    elsewhere plain PyTorch. In `eval()` what is random is left out: images are resized, if that was asked
    for, and normalized.
    """

    def __init__(
        self,
        operations: Sequence[Operation],
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        channels_last: bool = False,
        layout: str | None = None,
        interpolation: str = "bilinear",
        fill: int = 0,
        mask_fill: int = 0,
    ) -> None:
        super().__init__()
        require(0 <= seed < 2**63, "seed", "from 0 to 2⁶³ − 1", seed)
        require(dtype in _DTYPES, "dtype", "float32, float16 or bfloat16", dtype)
        require(layout in (None, "NCHW", "NHWC"), "layout", "NCHW, NHWC or None, to tell by the shape", layout)
        require(interpolation in ("bilinear", "nearest"), "interpolation", "bilinear or nearest", interpolation)
        require(0 <= fill <= 255, "fill", "from 0 to 255", fill)
        self.operations = tuple(operations)
        self.seed, self.dtype, self.channels_last, self.layout = seed, dtype, channels_last, layout
        self.fill, self.mask_fill = int(fill), mask_fill
        self.interpolation = interpolation
        self.notes: tuple[str, ...] = ()
        self._steps = steps(self.operations)
        self._programs: dict[tuple[Any, ...], BatchProgram] = {}
        self._plans: dict[tuple[Any, ...], KernelPlan] = {}
        self._handle = next(_handles)
        _alive[self._handle] = self

    @property
    def _memory_format(self) -> torch.memory_format:
        return torch.channels_last if self.channels_last else torch.contiguous_format

    @staticmethod
    def from_torchvision(transform: object, **options: Any) -> Augment:
        """The same as a torchvision transform; `notes` says what differs. What cannot be converted is
        a ValueError."""
        from .torchvision import convert

        operations, fill, notes = convert(transform)
        augment = Augment(operations, **{"fill": fill, **options})
        augment.notes = notes
        return augment

    def forward(
        self,
        images: Tensor,
        masks: Tensor | None = None,
        *,
        index: Tensor | None = None,
        epoch: int = 0,
        params: Tensor | None = None,
        return_params: bool = False,
    ) -> Any:
        """The augmented images, then the masks if given, then the params with `return_params`.

        Given params are used again.
        """
        work = torch.ops.flatout.augment if torch.compiler.is_compiling() else _run
        out, out_masks, rows = work(images, masks, index, params, epoch, self._handle, self.training)
        results = [out]
        if masks is not None:
            results.append(out_masks)
        if return_params:
            results.append(rows)
        return tuple(results) if len(results) > 1 else out

    def columns(self, images: Tensor) -> tuple[str, ...]:
        """What the columns of `params` are for such images."""
        return self._program(self._channels_first(images), self.training).columns

    def extra_repr(self) -> str:
        """The operations and the options, for print."""
        return ", ".join([*map(str, self.operations), f"seed={self.seed}", f"dtype={self.dtype}"])

    def _program(self, images: Tensor, training: bool) -> BatchProgram:
        key = channels, height, width, _ = (*map(int, images.shape[1:]), training)
        if key not in self._programs:
            steps = [
                step for step in self._steps if training or isinstance(step.operation, (ops.Resize, ops.Normalize))
            ]
            nearest = self.interpolation == "nearest"
            self._programs[key] = BatchProgram.build(steps, (height, width), channels, nearest=nearest)
        return self._programs[key]

    def _plan(self, program: BatchProgram, images: Tensor) -> KernelPlan:
        from . import kernel_launch  # which imports triton

        key = (id(program), images.device, images.stride()[1:], kernel_launch.in_words(images))
        if key not in self._plans:
            options: dict[str, Any] = {"dtype": self.dtype, "channels_last": self.channels_last, "fill": self.fill}
            self._plans[key] = kernel_launch.KernelPlan(program, images, **options)
        return self._plans[key]

    def _channels_first(self, images: Tensor) -> Tensor:
        """NHWC or NCHW as a view in NCHW."""
        is_bytes = isinstance(images, Tensor) and images.dtype == torch.uint8
        require(is_bytes, "images", "a uint8 tensor", _described(images))
        shape = tuple(images.shape)
        first = len(shape) == 4 and 1 <= shape[1] <= 4 and self.layout != "NHWC"
        last = len(shape) == 4 and 1 <= shape[3] <= 4 and self.layout != "NCHW"
        layout = self.layout or "NCHW or NHWC"
        require((first or last) and 0 not in shape[1:], "images", f"{layout} with 1 to 4 channels", shape)
        require(not (first and last), "layout", "given for images that could be NCHW and NHWC", shape)
        return images if first else images.movedim(3, 1)


class Minimal(Augment):
    """Flip, normalize."""

    def __init__(
        self,
        size: int | tuple[int, int] | None = None,
        *,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        **options: Any,
    ) -> None:
        require(size is None or isinstance(size, (int, tuple, list)), "size", "a number or (height, width)", size)
        if isinstance(size, int):
            size = size, size
        resize = [] if size is None else [ops.Resize(size)]
        super().__init__([*resize, *self._random(), ops.Normalize(mean, std)], **options)

    def _random(self) -> list[Operation]:
        return [ops.HFlip(0.5)]


class Standard(Minimal):
    """Flip, rotate by up to 15°, brightness and contrast 0.2, normalize."""

    def _random(self) -> list[Operation]:
        return [ops.HFlip(0.5), ops.Rotate(15), ops.Brightness(0.2), ops.Contrast(0.2)]


class Strong(Minimal):
    """Flip, affine, full colour jitter, a blur on every second sample, normalize."""

    def _random(self) -> list[Operation]:
        affine = ops.Affine(degrees=30, translate=0.1, scale=(0.8, 1.2), shear=10)
        return [ops.HFlip(0.5), affine, ops.ColorJitter(0.4, 0.4, 0.4, 0.1), ops.Blur(5, (0.1, 2.0), p=0.5)]


class Schedule(nn.Module):
    """One augmentation from each given epoch on: `Schedule({0: Minimal(), 50: Strong()})`."""

    def __init__(self, stages: Mapping[int, Augment]) -> None:
        super().__init__()
        require(bool(stages) and min(stages) == 0, "stages", "a mapping whose first epoch is 0", sorted(stages))
        self.starts = sorted(stages)
        self.stages = nn.ModuleList(stages[start] for start in self.starts)

    def at(self, epoch: int) -> Augment:
        """The augmentation of that epoch."""
        return cast(Augment, self.stages[sum(start <= epoch for start in self.starts) - 1])

    def forward(self, images: Tensor, masks: Tensor | None = None, *, epoch: int = 0, **arguments: Any) -> Any:
        """As `Augment.forward`, by the stage of this epoch."""
        return self.at(epoch)(images, masks, epoch=epoch, **arguments)


# `torch.compile` is to see one opaque operation: a function of tensors and numbers, which finds its
# Augment by number.
_alive: weakref.WeakValueDictionary[int, Augment] = weakref.WeakValueDictionary()
_handles = itertools.count()


@torch.no_grad()
def _run(
    images: Tensor, masks: Tensor | None, index: Tensor | None, params: Tensor | None, epoch: int, handle: int,
    training: bool,
) -> list[Tensor]:  # fmt: skip
    """Images, masks (nothing where there were none) and params."""
    augment = _alive[handle]
    images = augment._channels_first(images)
    program = augment._program(images, training)
    planes = None if masks is None else _planes(masks, images)
    index = _checked_index(index, images, needed=bool(program.table) and params is None)
    require(0 <= epoch < 2**31, "epoch", "from 0 to 2³¹ − 1", epoch)
    if params is not None:
        shape = (len(images), len(program.columns))
        fits = params.dtype == torch.float32 and params.shape == shape and params.device == images.device
        require(fits, "params", f"float32 of {shape} on {images.device}", _described(params))
    if len(images) == 0:
        return _empty(augment, images, masks, program)
    out_masks = images.new_empty(0, dtype=torch.float32)
    if images.is_cuda:
        plan = augment._plan(program, images)
        if params is None:
            rows, sums = plan.draw(index, epoch, augment.seed)
        else:
            rows, sums = params, plan.no_sums(params)
        out = plan.apply(images, rows, sums)
        if planes is not None:
            out_masks = plan.apply_masks(planes, rows, augment.mask_fill)
    else:
        rows = draw(program, index, epoch, augment.seed) if params is None else params
        out = batch_program.apply(program, images, rows, augment.fill)
        out = out.to(augment.dtype, memory_format=augment._memory_format)
        if planes is not None:
            out_masks = batch_program.apply_masks(program, planes, rows, augment.mask_fill)
    if masks is not None and masks.dim() == 3:
        out_masks = out_masks[:, 0]
    return [out, out_masks, rows]


def _empty(augment: Augment, images: Tensor, masks: Tensor | None, program: BatchProgram) -> list[Tensor]:
    """Tensors of the right kinds with nothing in them yet."""
    (n, channels), size, device, layout = images.shape[:2], program.out_size, images.device, augment._memory_format
    out = torch.empty((n, channels, *size), dtype=augment.dtype, device=device, memory_format=layout)
    rows = torch.empty(n, len(program.columns), device=device)
    if masks is None:
        return [out, rows.new_empty(0), rows]
    return [out, masks.new_empty(*masks.shape[:-2], *size), rows]


@torch.library.custom_op("flatout::augment", mutates_args=())
def _run_compiled(
    images: Tensor, masks: Tensor | None, index: Tensor | None, params: Tensor | None, epoch: int, handle: int,
    training: bool,
) -> list[Tensor]:  # fmt: skip
    out, out_masks, rows = _run(images, masks, index, params, epoch, handle, training)
    if params is not None:
        rows = rows.clone()  # an operation must not return its arguments
    return [out, out_masks, rows]


@_run_compiled.register_fake
def _(images: Tensor, masks: Tensor | None, *others: Any) -> list[Tensor]:
    *_, handle, training = others
    augment = _alive[handle]
    images = augment._channels_first(images)
    return _empty(augment, images, masks, augment._program(images, training))


def _planes(masks: Tensor, images: Tensor) -> Tensor:
    """B×H×W or B×K×H×W as B×K×H×W."""
    expected = (len(images), *images.shape[2:])
    fits = masks.dim() in (3, 4) and (masks.shape[0], *masks.shape[-2:]) == expected
    require(fits, "masks", f"B×H×W or B×K×H×W where B, H, W are the images' {expected}", tuple(masks.shape))
    require(masks.device == images.device, "masks", f"on {images.device}, as the images are", masks.device)
    return masks[:, None] if masks.dim() == 3 else masks


def _checked_index(index: Tensor | None, images: Tensor, needed: bool) -> Tensor:
    n = len(images)
    if index is None and not needed:
        return torch.zeros(n, dtype=torch.int64, device=images.device)
    whole = isinstance(index, Tensor) and not index.dtype.is_floating_point and tuple(index.shape) == (n,)
    require(whole, "index", f"a tensor of {n} whole numbers, the images' places in the data set", _described(index))
    return cast(Tensor, index).to(images.device, torch.int64, non_blocking=True)


def _described(value: object) -> object:
    if not isinstance(value, Tensor):
        return value
    return f"{value.dtype} of {tuple(value.shape)} on {value.device}"
