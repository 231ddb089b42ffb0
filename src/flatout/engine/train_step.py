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
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from flatout.engine.config import TrainConfig
from flatout.engine.model_setup import StepPrecision
from flatout.model.errors import FlatoutError, UsageError
from flatout.model.formatting import count_of

# Steps of each form: until it is compiled, captured and tuned; then those that are measured.
WARM, TIMED = 6, 12
MIN_EAGER_GAIN = 1.05
# Batches of another shape that may be: a share, and so many at the start.
ODD_ONE_IN, ODD_ANYWAY = 8, 2
_FIRST_SCALE = 65536.0  # torch's own

Shapes = tuple[torch.Size, ...]  # of the tensors in a batch


class GraphsOrEager:
    """Whether a model that was captured as CUDA graphs takes a step as graphs, or eagerly.

    Compiling does not always pay: torch's compiler stops before an LSTM and goes on behind it, at a cost
    in every step. So with `contest` both forms are measured at the start, and training goes on with the
    faster one. A batch of another shape, such as an epoch's last, is eager; where many have another
    shape, graphs are no good.
    """

    def __init__(self, *, contest: bool) -> None:
        self.contest = contest
        self._seen: Counter[Shapes] = Counter()
        self._usual: Shapes | None = None
        self._measured = 0
        self._times: tuple[list[tuple[torch.cuda.Event, torch.cuda.Event]], ...] = ([], [])

    @property
    def eager(self) -> bool:
        """Whether it is the eager form's turn to be measured."""
        return self.contest and WARM + TIMED <= self._measured < 2 * (WARM + TIMED)

    @property
    def varied(self) -> bool:
        """Whether batches have many shapes."""
        steps = self._seen.total()
        return ODD_ONE_IN * (steps - max(self._seen.values(), default=0) - ODD_ANYWAY) > steps

    @contextlib.contextmanager
    def turn(self, shapes: Shapes) -> Iterator[None]:
        """One step's forward and backward pass over a batch of these shapes."""
        self._seen[shapes] += 1
        # The first of those that were as often.
        usual = max(self._seen, key=lambda known: self._seen[known])
        if self._usual is not None and usual != self._usual:
            # The training began with a batch of another shape, and was compiled for that.
            torch.compiler.reset()
            self._measured, self._times = 0, ([], [])
        self._usual = usual
        eager, odd = self.eager, shapes != usual
        if not self.contest or odd or self._measured >= 2 * (WARM + TIMED):
            with _stance(eager or odd):
                yield
            return
        begin = _event()
        with _stance(eager):
            yield
        if self._measured % (WARM + TIMED) >= WARM:
            self._times[eager].append((begin, _event()))
        self._measured += 1

    def result(self) -> tuple[float, float] | None:
        """Milliseconds of a step as graphs and of an eager one; once, when the GPU has come to the last of them."""
        if not self.contest or len(self._times[True]) < TIMED or not self._times[True][-1][1].query():
            return None
        self.contest = False
        captured, eager = ([a.elapsed_time(b) for a, b in side] for side in self._times)
        # The fastest quarter of the steps: an X-ray may slow the others.
        return statistics.quantiles(captured, n=4)[0], statistics.quantiles(eager, n=4)[0]


def _stance(eager: bool) -> contextlib.AbstractContextManager[Any]:
    return torch.compiler.set_stance("force_eager") if eager else contextlib.nullcontext()


def _event() -> torch.cuda.Event:
    # The time on the GPU, so that nothing waits.
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class TrainStep:
    """Learns from one batch at a time."""

    def __init__(
        self,
        model: nn.Module,
        criterion: Callable[..., Any] | None,
        optimizer: torch.optim.Optimizer,
        precision: StepPrecision,
        config: TrainConfig,
        say: Callable[[str], None],
        *,
        form: GraphsOrEager | None = None,
    ) -> None:
        self.model, self.criterion, self.optimizer = model, criterion, optimizer
        self.precision = precision
        self.accumulate = config.accumulate
        self.scaler = torch.amp.GradScaler(precision.device.type, _FIRST_SCALE, enabled=precision.scaled)
        self._clip_norm, self._on_nan = config.clip_norm, config.on_nan
        self._parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._say = say
        # The gradients of a captured model are in the graphs' memory, and written over by the next pass.
        self._captured = list(model.parameters()) if form is not None else []
        self._form = form
        self._uncaptured_mode = {"max-autotune": "max-autotune-no-cudagraphs"}.get(str(config.compile))
        self._exchanging = False

    def __call__(self, batch: Any) -> Tensor:
        """The loss of `batch`, on its device; the weights have learned from it."""
        while True:
            turn = self._form.turn(shapes_in(batch)) if self._form is not None else contextlib.nullcontext()
            try:
                with turn:
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
        if self._form is not None:
            self._settle(self._form)
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

    def _settle(self, form: GraphsOrEager) -> None:
        """Go on eagerly if that is faster, or without graphs if batches have many shapes."""
        captured, eager = form.result() or (0.0, 0.0)
        if captured > MIN_EAGER_GAIN * eager and self._remove_compiler():
            torch.compiler.reset()  # which gives the graphs' memory back
            self._say(f"train.compile: off from here on, a step takes {captured:.1f} ms compiled and {eager:.1f} eager")
        elif form.varied and self._remove_compiler():
            torch.compiler.reset()
            self._bare.forward = torch.compile(self._bare.forward, mode=self._uncaptured_mode)
            self._say("train.compile: on, without CUDA graphs from here on: batches have many shapes")

    def _remove_compiler(self) -> bool:
        """Go on eagerly; whether the model was compiled until now."""
        for parameter in self._captured:
            parameter.grad = None  # it is in the graphs' memory
        self._form, self._captured = None, []
        return uncompile(self._bare)

    @property
    def _bare(self) -> nn.Module:
        model: nn.Module = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        return model

    def _repair(self, problem: Exception, batch: Any) -> str | None:
        """Change what can be changed so that the step can be repeated; what was done, or None."""
        exchanging, self._exchanging = self._exchanging, False
        if out_of_memory(problem):
            if self._form is not None and self._form.eager:
                self._form.contest = False
                return "train.compile: on, there is no memory for an eager step beside it"
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


def is_compiled(model: nn.Module) -> bool:
    """Whether the compiler is called in its forward pass."""
    return hasattr(model.forward, "_torchdynamo_orig_callable")


def uncompile(model: nn.Module) -> bool:
    """Take the compiler away from a model again; whether it had one."""
    plain = getattr(model.forward, "_torchdynamo_orig_callable", None)
    if plain is not None:
        model.forward = plain
    return plain is not None


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
