"""One optimizer step: a batch in, its loss out, the weights moved.

    batch ─► pieces (accumulate) ─► forward in the precision ─► backward ─► clip ─► optimizer
                 ▲ out of memory: twice as many, and the very same step again

A batch is a tuple, the model's inputs and then the target; without a criterion the model gets all of it
and returns the loss, or something with a `.loss`. Nothing here waits for the GPU, unless `on_nan: skip`
asks for it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from flatout.engine.config import TrainConfig
from flatout.engine.model_setup import StepPrecision, uncompile
from flatout.model.errors import FlatoutError, UsageError
from flatout.model.formatting import count_of

# Batches of another shape that graphs put up with: one in so many, and so many at the start.
ODD_ONE_IN, ODD_ANYWAY = 8, 2
_FIRST_SCALE = 65536.0  # torch's own

Shapes = tuple[torch.Size, ...]  # of the tensors in a batch


class TrainStep:
    """Learns from one batch at a time; `captured` says that the model runs as CUDA graphs."""

    def __init__(
        self,
        model: nn.Module,
        criterion: Callable[..., Any] | None,
        optimizer: torch.optim.Optimizer,
        precision: StepPrecision,
        config: TrainConfig,
        say: Callable[[str], None],
        *,
        captured: bool = False,
    ) -> None:
        self.model, self.criterion, self.optimizer = model, criterion, optimizer
        self.precision = precision
        self.accumulate = config.accumulate
        self.scaler = torch.amp.GradScaler(precision.device.type, _FIRST_SCALE, enabled=precision.scaled)
        self._clip_norm, self._on_nan = config.clip_norm, config.on_nan
        self._parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._say = say
        # The gradients of a captured model are in the graphs' memory, and written over by the next pass.
        self._captured = list(model.parameters()) if captured else []
        self._uncaptured_mode = {"max-autotune": "max-autotune-no-cudagraphs"}.get(str(config.compile))
        self._usual: Shapes | None = None  # what the graphs are captured for
        self._steps = self._odd = 0
        self._exchanging = False

    def __call__(self, batch: Any) -> Tensor:
        """The loss of `batch`, on its device; the weights have learned from it."""
        while True:
            try:
                with self._graphs_or_eager(batch):
                    loss = self._gradients(batch)
                break
            except Exception as problem:
                repair = self._repair(problem, batch)
                if repair is None:
                    raise
            # Outside the except block: its traceback has kept the failed pass's tensors alive.
            self._say(repair)
            if self.precision.device.type == "cuda":
                torch.cuda.empty_cache()
        self._update()
        return loss

    def forward(self, batch: Any, model: nn.Module | None = None) -> tuple[Tensor, Any, Any]:
        """Loss, output and target of (a piece of) a batch."""
        model = model or self.model
        with self.precision.autocast():
            if self.criterion is None:
                output = model(**batch) if isinstance(batch, Mapping) else model(*batch)
                return getattr(output, "loss", output), output, None
            *inputs, target = batch
            output = model(*inputs)
            loss = self.criterion(output, target)
            if not isinstance(loss, Tensor):
                raise UsageError(f"criterion: expected a tensor as the loss (got {loss!r})")
            return loss, output, target

    def _graphs_or_eager(self, batch: Any) -> contextlib.AbstractContextManager[Any]:
        """A batch of another shape than the first is eager; where there are many of them, graphs are no good."""
        if not self._captured:
            return contextlib.nullcontext()
        shapes = shapes_in(batch)
        self._usual = self._usual or shapes
        self._steps += 1
        if shapes == self._usual:
            return contextlib.nullcontext()
        self._odd += 1
        if ODD_ONE_IN * (self._odd - ODD_ANYWAY) > self._steps and self._remove_compiler():
            torch.compiler.reset()  # which gives the graphs' memory back
            self._bare.forward = torch.compile(self._bare.forward, mode=self._uncaptured_mode)
            self._say("train.compile: on, without CUDA graphs from here on: batches have many shapes")
            return contextlib.nullcontext()
        eager: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
        return eager

    def _gradients(self, batch: Any) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        # Also of those that the optimizer leaves alone, which would be added to.
        for parameter in self._captured:
            parameter.grad = None
        rows, parts = batch_rows(batch), pieces(batch, self.accumulate)
        losses = []
        for part in parts:
            last = part is parts[-1]
            new = [parameter for parameter in self._captured if parameter.grad is None and not last]
            with contextlib.ExitStack() as stack:
                if not last and isinstance(self.model, DistributedDataParallel):
                    # Gradients go to the other ranks with the last piece.
                    stack.enter_context(self.model.no_sync())
                loss = self.forward(part)[0]
                if len(parts) > 1:
                    loss = loss * (batch_rows(part) / rows)
                self._exchanging = last
                self.scaler.scale(loss).backward()
                self._exchanging = False
            for parameter in new:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone()
            loss = loss.detach()
            # What the model returned may be written over too.
            if self._captured or self.criterion is None:
                loss = loss.clone()
            losses.append(loss)
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def _update(self) -> None:
        # A scaler skips such steps itself.
        checks_norm = self._on_nan == "skip" and not self.precision.scaled
        if self._clip_norm is not None or checks_norm:
            self.scaler.unscale_(self.optimizer)
            norm = nn.utils.clip_grad_norm_(self._parameters, self._clip_norm or math.inf)
            # Of averaged gradients: all ranks see the same norm.
            if checks_norm and not bool(norm.isfinite()):
                self.optimizer.zero_grad(set_to_none=True)
                return
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def _remove_compiler(self) -> bool:
        """Go on eagerly; whether the model was compiled until now."""
        for parameter in self._captured:
            parameter.grad = None  # it is in the graphs' memory
        self._captured = []
        return uncompile(self._bare)

    @property
    def _bare(self) -> nn.Module:
        model: nn.Module = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        return model

    def _repair(self, problem: Exception, batch: Any) -> str | None:
        """Change what can be changed so that the step can be repeated; what was done, or None."""
        exchanging, self._exchanging = self._exchanging, False
        if out_of_memory(problem):
            return self._halve(batch, exchanging)
        if self._captured and "CUDAGraphs" in str(problem):
            raise UsageError(
                "train.compile: the model keeps an output from one step to the next, and CUDA graphs write over it; "
                "train.compile=true compiles without them"
            ) from problem
        from_compiler = type(problem).__module__.startswith(("torch._dynamo", "torch._inductor", "triton"))
        if from_compiler and self._remove_compiler():
            why = " ".join(str(problem).strip().splitlines()[:2])
            return f"train.compile: off from here on, torch.compile failed ({type(problem).__name__}: {why})"
        return None

    def _halve(self, batch: Any, exchanging: bool) -> str:
        """Compute a batch in twice as many pieces from here on."""
        rows = batch_rows(batch)
        size = math.ceil(rows / self.accumulate)
        if size <= 1:
            raise UsageError("out of memory with one sample at a time: try train.checkpoint_activations=true") from None
        if exchanging and isinstance(self.model, DistributedDataParallel):
            raise FlatoutError(
                "out of memory while gradients were on their way to the other ranks, which cannot be taken back: "
                f"go on with --resume train.accumulate={2 * self.accumulate}"
            ) from None
        self.accumulate *= 2
        self.optimizer.zero_grad(set_to_none=True)
        if self._captured:
            torch.compiler.reset()  # graphs keep the memory they were captured with
        fewer = count_of(math.ceil(rows / self.accumulate), "sample")
        return (
            f"out of memory: {fewer} at a time from here on instead of {size}; "
            f"train.accumulate is {self.accumulate}, the batch stays {rows}, and this step is repeated"
        )


def out_of_memory(problem: BaseException) -> bool:
    """Whether the GPU's memory is full, in either of the two ways torch says it."""
    if isinstance(problem, torch.OutOfMemoryError):
        return True
    texts = ("CUDA out of memory", "CUDA error: out of memory")
    return isinstance(problem, RuntimeError) and any(text in str(problem) for text in texts)


# ------------------------------------------------------------ batches of any form


def batch_rows(batch: Any) -> int:
    """How many samples a batch has: the length of the first tensor in it."""
    if isinstance(batch, Tensor):
        return len(batch)
    values = batch.values() if isinstance(batch, Mapping) else batch
    for value in values if isinstance(values, Iterable) else ():
        if isinstance(value, Tensor) and value.dim():
            return len(value)
        if isinstance(value, Mapping | list | tuple):
            return batch_rows(value)
    raise UsageError(f"there is no tensor in a batch, and no telling how many samples it has (got {batch!r:.60})")


def shapes_in(batch: Any) -> Shapes:
    """The shape of every tensor in a batch."""
    if isinstance(batch, Tensor):
        return (batch.shape,)
    values = batch.values() if isinstance(batch, Mapping) else batch
    return tuple(shape for value in values for shape in shapes_in(value)) if _is_group(batch) else ()


def pieces(batch: Any, count: int) -> list[Any]:
    """A batch cut into `count` of the same structure (fewer where it has fewer samples), as equal as can be."""
    if count == 1:
        return [batch]
    rows = batch_rows(batch)
    count = min(count, rows)
    bounds = pairwise(rows * place // count for place in range(count + 1))
    return [map_samples(batch, itemgetter(slice(start, end))) for start, end in bounds]


def map_samples(batch: Any, change: Callable[[Any], Any]) -> Any:
    """The batch with `change` done to each of its tensors, and to each list that has one name a sample."""
    rows = batch_rows(batch)

    def within(thing: Any) -> Any:
        if isinstance(thing, Tensor):
            return change(thing) if thing.dim() and len(thing) == rows else thing
        if isinstance(thing, Mapping):
            return {key: within(value) for key, value in thing.items()}
        if not isinstance(thing, list | tuple):
            return thing
        if len(thing) == rows and not any(isinstance(value, Tensor) or _is_group(value) for value in thing):
            return change(thing)
        parts = [within(value) for value in thing]
        return type(thing)(*parts) if hasattr(thing, "_fields") else type(thing)(parts)

    return within(batch)


def _is_group(thing: Any) -> bool:
    return isinstance(thing, Mapping | list | tuple)
