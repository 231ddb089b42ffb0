"""This process among those that train together, the model on its device, and one optimizer step of it.

    Ranks: what they agree on travels between hosts (gloo), beside the gradients and without the GPU
    model ─► layout, checkpointed activations, compilation: each a `Decision` with its reason
    batch ─► pieces (accumulate) ─► forward in the precision ─► backward ─► clip ─► optimizer
                 ▲ out of memory: twice as many, and the very same step again

What a GPU cannot do becomes what it can; a setting that can have no effect at all is an error. A batch is a
tuple, the model's inputs and then the target; without a criterion the model gets all of it and returns the
loss, or something with a `.loss`. Nothing waits for the GPU, unless `on_nan: skip` asks for it.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from flatout.engine.config import TrainConfig, nearest
from flatout.engine.datasets import Shapes, batch_rows, pieces, shapes_in
from flatout.inside.compiler import round_as_eager
from flatout.model.errors import FlatoutError, UsageError
from flatout.model.formatting import count_of
from flatout.sample import budget

# Batches of another shape that graphs put up with: one in so many, and so many at the start.
ODD_ONE_IN, ODD_ANYWAY = 8, 2
_FIRST_SCALE = 65536.0  # torch's own
_WITH_GRAPHS = "on, with CUDA graphs"
CAPTURING = (_WITH_GRAPHS, "reduce-overhead", "max-autotune")


class Ranks:
    """This process among those that train together; a single one agrees with itself."""

    def __init__(self, device_type: str) -> None:
        self.world = int(os.environ.get("WORLD_SIZE", "1") or 1)
        self._ours = False
        if dist.is_available() and dist.is_initialized():
            self.world = dist.get_world_size()
        elif self.world > 1:
            dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
            self._ours = True
        self.rank = dist.get_rank() if self.world > 1 else 0
        self.local_rank = int(os.environ.get("LOCAL_RANK", self.rank))
        self._host = dist.new_group(backend="gloo") if self.world > 1 else None
        if budget.measure().ranks_on_node > 1:
            torch.set_num_threads(max(1, int(budget.measure().cores_allowed)))

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes and speaks."""
        return self.rank == 0

    def total(self, values: Iterable[float]) -> list[float]:
        """The sums over all ranks."""
        return list(map(sum, zip(*self.gathered(values), strict=True)))

    def highest(self, values: Iterable[float]) -> list[float]:
        """The highest values of any rank."""
        return list(map(max, zip(*self.gathered(values), strict=True)))

    def gathered(self, thing: Any) -> list[Any]:
        """What every rank has, in the order of the ranks."""
        if self._host is None:
            return [thing]
        things: list[Any] = [None] * self.world
        dist.all_gather_object(things, thing, group=self._host)
        return things

    def leave(self) -> None:
        """End the process group that was started here."""
        if self._ours:
            dist.destroy_process_group()
            self._ours = False


@dataclass(frozen=True, slots=True)
class Decision:
    """A setting as it is in force, and why; `instead` of what was asked for, which is said even when
    quiet."""

    name: str
    value: str
    why: str = ""
    instead: bool = False

    def __str__(self) -> str:
        return f"{self.name}: {self.value}" + (f"  ({self.why})" if self.why else "")


@dataclass(frozen=True, slots=True)
class StepPrecision:
    """What a step is computed in: `dtype` under autocast (None: as the model is), TF32 or not, scaled
    or not."""

    device: torch.device
    dtype: torch.dtype | None
    tf32: bool
    scaled: bool

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """For one forward pass: autocast left on keeps stale copies of the weights."""
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.dtype)


def choose_precision(asked: str, device: torch.device) -> tuple[StepPrecision, Decision]:
    """The precision in force on this device."""
    name, why = asked, ""
    if device.type != "cuda":
        name, why = _precision_without_gpu(asked, device)
    elif asked in ("auto", "bf16") and not torch.cuda.is_bf16_supported(including_emulation=False):
        name, why = "fp16", f"{torch.cuda.get_device_name(device)} has no bf16: fp16 with a loss scaler instead"
    elif asked == "auto":
        name, why = "bf16", "the default on this GPU"
    elif asked == "tf32" and torch.cuda.get_device_capability(device) < (8, 0):
        name, why = "off", f"{torch.cuda.get_device_name(device)} has no TF32: plain fp32"
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name)
    tf32 = device.type == "cuda" and name != "off"
    decision = Decision("train.precision", name, why, instead=asked not in ("auto", name))
    return StepPrecision(device, dtype, tf32, name == "fp16"), decision


def _precision_without_gpu(asked: str, device: torch.device) -> tuple[str, str]:
    if asked == "auto":
        return "off", f"the default on {device.type}"
    if asked == "tf32":
        return "off", f"only NVIDIA GPUs have TF32: plain fp32 on {device.type}"
    if asked == "fp16":
        raise UsageError(f"train.precision: fp16 needs a GPU (the device is {device.type}); use bf16 or off")
    return asked, ""


@contextlib.contextmanager
def torch_switches(precision: StepPrecision, *, deterministic: bool) -> Iterator[None]:
    """Set torch's own switches, and put them back afterwards."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = torch.are_deterministic_algorithms_enabled()
    kept = matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic
    if deterministic and precision.device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
    matmul.allow_tf32, cudnn.allow_tf32 = precision.tf32, precision.tf32
    cudnn.benchmark, cudnn.deterministic = not deterministic, deterministic
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic = kept
        torch.use_deterministic_algorithms(before)


def choose_device(asked: str, local_rank: int) -> torch.device:
    """The device a config names: with several ranks, each has the GPU of its number."""
    has_gpu = torch.cuda.is_available()
    if asked == "cpu" or (asked == "auto" and not has_gpu):
        return torch.device("cpu")
    if not has_gpu:
        raise UsageError(f"train.device: {asked}, but there is no GPU here that torch can use")
    device = torch.device(asked if ":" in asked else f"cuda:{local_rank}")
    if device.index >= torch.cuda.device_count():
        raise UsageError(f"train.device: {device}, but torch sees {torch.cuda.device_count()} GPU(s)")
    torch.cuda.set_device(device)
    return device


def prepare_model(model: nn.Module, config: TrainConfig, device: torch.device, ranks: int = 1) -> list[Decision]:
    """Bring the model to the device, in the form that is fastest there: layout, checkpointing,
    compilation."""
    model.to(device)
    model.train()
    return [
        _set_layout(model, config.channels_last, device),
        _checkpoint_activations(model, config.checkpoint_activations),
        _compile(model, config.compile, device, ranks),
    ]


def _set_layout(model: nn.Module, asked: bool | str, device: torch.device) -> Decision:
    name = "train.channels_last"
    if not any(isinstance(module, nn.Conv2d | nn.ConvTranspose2d) for module in model.modules()):
        return Decision(name, "off", "there is no 2-d convolution", instead=asked is True)
    on, why = bool(asked), ""
    if asked == "auto":
        on, why = device.type == "cuda", f"the default on {device.type}"
    if on:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Decision(name, "on" if on else "off", why)


def _checkpoint_activations(model: nn.Module, asked: bool | list[str]) -> Decision:
    name = "train.checkpoint_activations"
    if not asked:
        return Decision(name, "off")
    modules = {path: module for path, module in model.named_modules() if path}
    chosen: list[str] = []
    if asked is True:
        parents = {path: model.get_submodule(path.rpartition(".")[0]) for path in modules}
        blocks = [path for path, parent in parents.items() if isinstance(parent, nn.Sequential | nn.ModuleList)]
        chosen = [path for path in blocks if not any(path.startswith(f"{outer}.") for outer in blocks)]
        if not chosen:
            raise UsageError(f"{name}: no nn.Sequential or nn.ModuleList to take blocks from; name the modules")
    for pattern in asked if isinstance(asked, list) else ():
        matching = [path for path in modules if fnmatchcase(path, pattern)]
        if not matching:
            raise UsageError(f"{name}: no module is called {pattern!r}{nearest(pattern, modules)}")
        chosen += matching
    for path in dict.fromkeys(chosen):
        module = modules[path]
        # batch_size: auto has prepared it before.
        if getattr(module.forward, "func", None) is not checkpoint:
            module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
    more = " …" * (len(chosen) > 3)
    return Decision(name, f"{len(set(chosen))} modules", ", ".join(chosen[:3]) + more)


def _compile(model: nn.Module, asked: bool | str, device: torch.device, ranks: int) -> Decision:
    """Compile it; with one rank capture it too: most steps take the host longer to launch than the
    GPU to run."""
    name, value, why = "train.compile", str(asked), "eager should it fail"
    if asked is False:
        return Decision(name, "off")
    if asked == "auto":
        if device.type != "cuda":
            return Decision(name, "off", f"the default on {device.type}")
        if any(isinstance(module, nn.RNNBase) for module in model.modules()):
            why = "the compiler stops before an RNN and goes on behind it, at a cost in every step"
            return Decision(name, "off", why)
        value, why = "on", f"the default on {device.type}"
        if ranks == 1:
            value = _WITH_GRAPHS
    elif asked is True:
        value = "on"
    mode = {"on": None, _WITH_GRAPHS: "reduce-overhead"}.get(value, value)
    try:
        round_as_eager()
        # `model.compile()` would pass over an nn.Sequential in silence; the forward method is
        # compiled in any case.
        model.forward = torch.compile(model.forward, mode=mode)
    except Exception as problem:  # without a compiler that works, training goes on eagerly
        return Decision(name, "off", f"torch.compile failed: {type(problem).__name__}: {problem}", instead=True)
    return Decision(name, value, f"{why}; the first step takes longer")


def uncompile(model: nn.Module) -> bool:
    """Take the compiler away from a model again; whether it had one."""
    plain = getattr(model.forward, "_torchdynamo_orig_callable", None)
    if plain is not None:
        model.forward = plain
    return plain is not None


# ------------------------------------------------------------ one step


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
        self._bare = model
        if isinstance(model, DistributedDataParallel):
            self._bare = model.module
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
        """A batch of another shape than the first is eager; where there are many of them, graphs are
        no good."""
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
        rows = batch_rows(batch)
        size = math.ceil(rows / self.accumulate)
        if size <= 1:
            raise UsageError("out of memory with one sample at a time: try train.checkpoint_activations=true") from None
        if exchanging and self._bare is not self.model:
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
