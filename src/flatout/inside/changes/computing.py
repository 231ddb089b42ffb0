"""Changes to what is computed: the optimizer's kernels, and what happens around the calls of a root module.

Each change is a class whose `on` and `off` may be called between two steps, as often as one likes. It
begins switched on, and gets in at its moment: when an optimizer is built, at the first call of a root
module, or when a step ends.
"""

from __future__ import annotations

import functools
import gc
import inspect
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import _device_dtype_check_for_fused
from torch.utils._pytree import tree_map_only

from flatout.inside.calls import caller
from flatout.inside.changes.ledger import Ledger
from flatout.inside.compiler import draw_as_eager, round_as_eager
from flatout.inside.fingerprints import FingerprintLog
from flatout.inside.patches import Subscriber, original
from flatout.inside.root_modules import Call, RootModules, WeakIdMap

_HAVE_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
_CAPTURING = ("reduce-overhead", "max-autotune")  # ways to compile that make CUDA graphs


class LiveChange:
    """A change that can be switched between two steps. `ledger` is told what became of it."""

    name = ""

    def __init__(self, ledger: Ledger, optimizers: WeakIdMap) -> None:
        change = ledger.wanted(self.name)
        assert change is not None
        self.value = change.value
        self._ledger = ledger
        self._optimizers = optimizers
        self.is_on = True

    def on(self) -> None:
        """Make the change from the next step on."""
        self.is_on = True

    def off(self) -> None:
        """Put back what it changed: from the next step on, training is as if it had never been made."""
        self.is_on = False

    def _made(self, how: str, where: str | None = None) -> None:
        self._ledger.made(self.name, how, where)

    def _refused(self, why: str) -> None:
        self._ledger.refused(self.name, why)


class RootChange(LiveChange):
    """A change around the calls of root modules."""

    def around(self, module: Any, call: Call, where: str | None) -> Call:
        """How a root module is to be called, at its first call."""
        raise NotImplementedError


class CudnnBenchmark(RootChange):
    """torch.backends.cudnn.benchmark, for the process."""

    name = "cudnn_benchmark"
    _before: bool | None = None

    def around(self, module: Any, call: Call, where: str | None) -> Call:
        if not torch.cuda.is_available():
            self._refused("there is no GPU")
        elif torch.are_deterministic_algorithms_enabled() or torch.backends.cudnn.deterministic:
            self._refused("the script asks for deterministic algorithms")
        elif torch.backends.cudnn.benchmark:
            self._refused("it is on already")
        else:
            self._before = torch.backends.cudnn.benchmark
            self._made("torch.backends.cudnn.benchmark = True", where)
            self._set(self.is_on)
        return call

    def on(self) -> None:
        super().on()
        self._set(True)

    def off(self) -> None:
        super().off()
        self._set(False)

    def _set(self, value: bool) -> None:
        if self._before is not None:
            torch.backends.cudnn.benchmark = value or self._before


class ChannelsLast(RootChange):
    """Convolution weights, their optimizer state and 4-d inputs in channels_last."""

    name = "channels_last"

    def __init__(self, ledger: Ledger, optimizers: WeakIdMap) -> None:
        super().__init__(ledger, optimizers)
        self._modules = WeakIdMap()

    def around(self, module: Any, call: Call, where: str | None) -> Call:
        images = [p for p in module.parameters() if p.dim() == 4]
        if not images:
            self._refused("the model has no convolutions over pictures")
            return call
        if all(p.is_contiguous(memory_format=torch.channels_last) for p in images):
            self._refused("the model is in channels_last already")
            return call
        self._modules.put(module)
        if self.is_on:
            self._lay_out(module, torch.channels_last)
        self._made("model.to(memory_format=torch.channels_last), and 4-d inputs likewise", where)

        def call_laid_out(*args: Any, **kwargs: Any) -> Any:
            if not self.is_on:
                return call(*args, **kwargs)
            return call(*map(_in_channels_last, args), **{key: _in_channels_last(one) for key, one in kwargs.items()})

        return call_laid_out

    def on(self) -> None:
        super().on()
        for module in self._modules:
            self._lay_out(module, torch.channels_last)

    def off(self) -> None:
        super().off()
        for module in self._modules:
            self._lay_out(module, torch.contiguous_format)

    def _lay_out(self, module: Any, memory_format: torch.memory_format) -> None:
        module.to(memory_format=memory_format)
        for optimizer in self._optimizers:  # a state has to lie as its parameter does
            for state in optimizer.state.values():
                for key, value in state.items():
                    if isinstance(value, torch.Tensor) and value.dim() == 4:
                        state[key] = value.contiguous(memory_format=memory_format)


class Compile(RootChange):
    """torch.compile of the root module; switched off, it is called as it was written."""

    name = "compile"

    def __init__(self, ledger: Ledger, optimizers: WeakIdMap, proof: FingerprintLog | None = None) -> None:
        super().__init__(ledger, optimizers)
        self._proof = proof
        self.compile_s = 0.0  # the first calls of what we compiled

    def around(self, module: Any, call: Call, where: str | None) -> Call:
        if hasattr(module, "_orig_mod") or call != module._call_impl:
            self._refused("the script compiles the model itself")
            return call
        round_as_eager()
        mode = None if self.value == "default" else self.value
        compiled = original(torch.compile)(_visible(module, call), mode=mode)
        self._made(f"model.compile(mode={self.value!r})", where)
        captured = self.value in _CAPTURING
        stop_looking = self._refuse_to_add_up(module) if captured else None
        went_well, seen = False, self._proof is None

        def call_compiled(*args: Any, **kwargs: Any) -> Any:
            nonlocal compiled, went_well, captured, seen
            if not self.is_on:
                return call(*args, **kwargs)
            if not seen:
                seen = module.training and torch.is_grad_enabled()
                with draw_as_eager():
                    return call(*args, **kwargs)
            start_s = time.perf_counter()
            try:
                result = compiled(*args, **kwargs)
            except Exception as problem:
                if went_well or not type(problem).__module__.startswith(("torch._dynamo", "torch._inductor")):
                    raise
                self._ledger.failed("compile", problem)
                compiled, went_well, captured = call, True, False
                if stop_looking is not None:
                    stop_looking()
                return call(*args, **kwargs)
            if not went_well:
                self.compile_s += time.perf_counter() - start_s
                went_well = True
            # Graphs write over what they returned: the script may keep it.
            return tree_map_only(torch.Tensor, torch.clone, result) if captured else result

        return call_compiled

    def _refuse_to_add_up(self, module: torch.nn.Module) -> Callable[[], None]:
        """End a run that adds gradients of several passes: those of CUDA graphs are written over by the
        next pass, and the sum would be wrong without a word. Returns what takes this back.

        Only the parameter with the first gradient of all is looked at: some may never have one.
        """
        handles: dict[torch.nn.Parameter, Any] = {}

        def look(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
            for other in [other for other in handles if other is not parameter]:
                handles.pop(other).remove()
            if self.is_on and parameter.grad is not None:
                raise RuntimeError("gradients of several passes are added up, and CUDA graphs would write over them")

        def stop() -> None:
            for handle in handles.values():
                handle.remove()
            handles.clear()

        for parameter in module.parameters():
            if parameter.requires_grad:
                handles[parameter] = parameter.register_hook(functools.partial(look, parameter))
        return stop


class PrecisionChange(RootChange):
    """TF32 for the process; bf16 and fp16 by autocast around each call of a root, with a loss scale for
    fp16.

    Autocast is never entered for the process: cached casts of weights would become stale. The result is
    float32 again, so that the script's loss is computed as before.
    """

    name = "precision"

    def __init__(self, ledger: Ledger, optimizers: WeakIdMap, changes: Subscriber) -> None:
        super().__init__(ledger, optimizers)
        self._changes = changes
        self._scaler: LossScale | None = None
        self._tf32_before: Callable[[], None] | None = None

    def around(self, module: Any, call: Call, where: str | None) -> Call:
        parameters = list(module.parameters())
        device = parameters[0].device.type
        if self.value == "tf32":
            if not self.is_on or self._allow_tf32():
                self._made("TF32 for matrix products and convolutions", where)
            else:
                self._refused("TF32 is on already")
            return call
        dtype = torch.bfloat16 if self.value == "bf16" else torch.float16
        why_not = _why_no_autocast(parameters, device, dtype)
        if why_not:
            self._refused(why_not)
            return call
        if dtype == torch.float16:
            self._scaler = self._scaler or LossScale(self._changes)
            self._scaler.is_on = self.is_on
            self._scaler.guard(parameters, self._optimizers)
        self._made(f"each call of the model under torch.autocast({device!r}, {dtype})", where)

        def call_in_autocast(*args: Any, **kwargs: Any) -> Any:
            if not self.is_on:
                return call(*args, **kwargs)
            with torch.autocast(device, dtype=dtype):
                result = call(*args, **kwargs)
            return tree_map_only(torch.Tensor, functools.partial(_as_float, dtype), result)

        return call_in_autocast

    def on(self) -> None:
        super().on()
        if self.value == "tf32":
            self._allow_tf32()
        if self._scaler is not None:
            self._scaler.is_on = True

    def off(self) -> None:
        super().off()
        if self._tf32_before is not None:
            self._tf32_before()
            self._tf32_before = None
        if self._scaler is not None:
            self._scaler.is_on = False

    def _allow_tf32(self) -> bool:
        if self._tf32_before is None:
            self._tf32_before = _allow_tf32()
        return self._tf32_before is not None


class FusedOptimizer(LiveChange):
    """fused=True for the optimizers that have it. Switching it off reads step counters from the GPU once."""

    name = "fused_optimizer"

    def __init__(self, ledger: Ledger, optimizers: WeakIdMap, changes: Subscriber) -> None:
        super().__init__(ledger, optimizers)
        self._ours = WeakIdMap()
        for kind in _HAVE_FUSED:
            where = f"{kind.__module__}.{kind.__qualname__}.__init__"
            changes.around(where, functools.partial(self._build, kind, inspect.signature(kind.__init__)))

    def built(self, optimizer: Any) -> None:
        """An optimizer has been built."""
        if not isinstance(optimizer, _HAVE_FUSED):
            self._refused(f"{type(optimizer).__name__} has no fused form in torch")

    def _build(
        self,
        kind: Any,
        signature: inspect.Signature,
        init: Call,
        optimizer: Any,
        params: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        params = list(params)  # to be gone through twice, should the first time fail
        if self.is_on:
            given = signature.bind_partial(optimizer, params, *args, **kwargs).arguments
            if given.get("fused") is None and given.get("foreach") is None and not given.get("differentiable"):
                try:
                    init(optimizer, params, *args, **{**kwargs, "fused": True})
                except Exception as problem:  # sparse or integer parameters, a device without it
                    self._refused(str(problem))
                else:
                    self._ours.put(optimizer)
                    self._made(f"{kind.__name__}(…, fused=True)", caller())
                    return
            elif not given.get("fused"):
                self._refused("the script chooses another way of stepping itself")
        init(optimizer, params, *args, **kwargs)

    def on(self) -> None:
        super().on()
        for optimizer in self._optimizers:
            if isinstance(optimizer, _HAVE_FUSED) and all(map(_leaves_it_open, optimizer.param_groups)):
                try:
                    for parameter in _trained_by(optimizer):
                        _device_dtype_check_for_fused(parameter)
                except Exception as problem:
                    self._refused(str(problem))
                else:
                    self._ours.put(optimizer)
                    self._set(optimizer, fused=True)
                    self._made(f"{type(optimizer).__name__}(…, fused=True)")

    def off(self) -> None:
        super().off()
        for optimizer in self._ours:
            self._set(optimizer, fused=False)

    def _set(self, optimizer: Any, *, fused: bool) -> None:
        for group in (optimizer.defaults, *optimizer.param_groups):
            group["fused"] = fused or None
        optimizer._step_supports_amp_scaling = fused
        for parameter, state in optimizer.state.items():
            if isinstance(state.get("step"), torch.Tensor):  # the fused kernels count on the parameter's own device
                state["step"] = state["step"].to(parameter.device if fused else "cpu")


class GcFreeze(LiveChange):
    """What lives after the first step is left out of garbage collections."""

    name = "gc_freeze"

    def __init__(self, ledger: Ledger, optimizers: WeakIdMap) -> None:
        super().__init__(ledger, optimizers)
        self.is_frozen = False

    def on(self) -> None:
        super().on()
        if not self.is_frozen:
            gc.collect()
            gc.freeze()
            self.is_frozen = True
            self._made("what lived after the first step is left out of garbage collections")

    def off(self) -> None:
        super().off()
        if self.is_frozen:
            gc.unfreeze()
            self.is_frozen = False


class Computing:
    """The plan's changes to model and optimizer; a `proof` is told what reaches a root module."""

    def __init__(
        self, ledger: Ledger, changes: Subscriber, roots: RootModules, proof: FingerprintLog | None = None
    ) -> None:
        self._ledger = ledger
        self._changes = changes
        self._roots = roots
        self._proof = proof
        self.optimizers = WeakIdMap()
        self.live: dict[str, LiveChange] = {}
        self._at_roots: list[RootChange] = []  # the first is innermost
        self._fused: FusedOptimizer | None = None
        self._compile: Compile | None = None
        self._freeze: GcFreeze | None = None

    def install(self) -> None:
        """Put the patches in place that the plan needs."""
        wanted, optimizers = self._ledger.wanted, self.optimizers
        if wanted("cudnn_benchmark"):
            self._at_roots.append(CudnnBenchmark(self._ledger, optimizers))
        if wanted("compile"):  # the compiler is to see nothing of ours
            self._compile = Compile(self._ledger, optimizers, self._proof)
            self._at_roots.append(self._compile)
        if wanted("channels_last"):
            self._at_roots.append(ChannelsLast(self._ledger, optimizers))
        if wanted("precision"):
            self._at_roots.append(PrecisionChange(self._ledger, optimizers, self._changes))
        if wanted("fused_optimizer"):
            self._fused = FusedOptimizer(self._ledger, optimizers, self._changes)
        if wanted("gc_freeze"):
            self._freeze = GcFreeze(self._ledger, optimizers)
        others = [change for change in (self._fused, self._freeze) if change is not None]
        self.live = {change.name: change for change in (*self._at_roots, *others)}
        self._changes.after("torch.optim.optimizer.Optimizer.__init__", self._optimizer_built)
        if self._at_roots or self._proof is not None:
            self._roots.start_changing(self._changes, self._around)

    @property
    def compile_s(self) -> float:
        """What the first calls of compiled models took."""
        return self._compile.compile_s if self._compile is not None else 0.0

    def device(self) -> torch.device | None:
        """Where the parameters are that an optimizer trains; None where that is in several places, or
        nowhere yet."""
        places = {parameter.device for optimizer in self.optimizers for parameter in _trained_by(optimizer)}
        return places.pop() if len(places) == 1 else None

    def finish(self) -> None:
        """The run is over: what has had no occasion says why."""
        if self._freeze is not None:
            self._freeze.off()
        for change in self._at_roots:
            self._ledger.refused(change.name, self._roots.why_none())

    @property
    def wants_a_step(self) -> bool:
        """Whether `step_ended` has something to do."""
        return self._freeze is not None and self._freeze.is_on and not self._freeze.is_frozen

    def step_ended(self) -> None:
        """A training step is over: what lives now lives long."""
        if self._freeze is not None and self.wants_a_step:
            self._ledger.attempt("gc_freeze", self._freeze.on)
            if not self._freeze.is_frozen:
                self._freeze = None

    def _optimizer_built(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.optimizers.put(optimizer)
        if self._fused is not None:
            self._fused.built(optimizer)

    def _around(self, module: Any, call: Call) -> Call:
        """How a root is to be called: each change in turn, the proof's look at the inputs outermost."""
        where = caller()
        for change in self._at_roots:
            if self._ledger.wanted(change.name):
                call = self._ledger.attempt(change.name, change.around, module, call, where) or call
        if self._proof is not None:
            call = _looked_at(module, call, self._proof)
        return call


def _looked_at(module: Any, call: Call, proof: FingerprintLog) -> Call:
    proof.roots.put(module)

    def look_and_call(*args: Any, **kwargs: Any) -> Any:
        watched = module.training and torch.is_grad_enabled()
        if watched:
            proof.inputs(args, kwargs)
        result = call(*args, **kwargs)
        if watched:
            proof.outputs(result, args, kwargs)
        return result

    return look_and_call


def _visible(module: Any, call: Call) -> Call:
    """A call the compiler will look into: of torch's own files it does so only from a frame outside them."""
    from torch._dynamo import external_utils, trace_rules

    if trace_rules.check(module.forward):
        return external_utils.wrap_inline(call)
    return call


def _in_channels_last(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dim() == 4:
        return value.contiguous(memory_format=torch.channels_last)
    return value


def _as_float(dtype: torch.dtype, tensor: Any) -> Any:
    return tensor.float() if tensor.dtype == dtype else tensor


def _allow_tf32() -> Callable[[], None] | None:
    """Allow it by the interface that the script has used: the old one cannot even be read after the new one
    was touched. Returns what takes it back; None where it was allowed already."""
    matmul: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    try:
        before: list[tuple[Any, str, Any]] = [(owner, "allow_tf32", owner.allow_tf32) for owner in (matmul, cudnn)]
        allowed: Any = True
    except RuntimeError:
        owners = (matmul, cudnn.conv, cudnn.rnn)
        before = [(owner, "fp32_precision", owner.fp32_precision) for owner in owners]
        allowed = "tf32"
    if all(value == allowed for _, _, value in before):
        return None
    for owner, switch, _ in before:
        setattr(owner, switch, allowed)

    def put_back() -> None:
        for owner, switch, value in before:
            setattr(owner, switch, value)

    return put_back


def _why_no_autocast(parameters: list[Any], device: str, dtype: torch.dtype) -> str:
    if torch.is_autocast_enabled(device):
        return "the script runs the model under autocast itself"
    if any(p.dtype != torch.float32 for p in parameters if p.is_floating_point()):
        return "the model's parameters are not float32"
    if dtype == torch.float16 and device != "cuda":
        return "float16 is for GPUs; a CPU has bfloat16"
    if device == "cuda" and dtype == torch.bfloat16 and not torch.cuda.is_bf16_supported(including_emulation=False):
        return "this GPU has no bfloat16: float16 is what it has"
    return ""


class LossScale:
    """What a GradScaler does, from outside: losses are scaled before `backward`, gradients unscaled as they
    arrive.

    So every gradient the script sees (to clip, to log) has its true size. A step whose gradients are not
    finite is skipped, and the scale halved; after many good ones it is doubled.
    """

    FIRST, GROW_AFTER = 2.0**16, 2000

    def __init__(self, changes: Subscriber) -> None:
        self.scale = self.FIRST
        self.is_on = True
        self._good = 0
        self._scaling = False
        self._guarded, self._parameters, self._optimizers = WeakIdMap(), WeakIdMap(), WeakIdMap()
        changes.around("torch.autograd.backward", self._backward)

    def _backward(self, call: Call, tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
        is_loss = isinstance(tensors, torch.Tensor) and tensors.numel() == 1 and grad_tensors is None
        if not self.is_on or not is_loss:
            return call(tensors, grad_tensors, *args, **kwargs)
        self._guard()
        self._scaling = True
        try:
            return call(tensors, torch.full_like(tensors, self.scale), *args, **kwargs)
        finally:
            self._scaling = False

    def guard(self, parameters: list[Any], optimizers: WeakIdMap) -> None:
        """Unscale what arrives at these parameters and those of the optimizers, which look at it before
        they step."""
        for parameter in parameters:
            self._parameters.put(parameter, True)
        self._optimizers = optimizers
        self._guard()

    def _guard(self) -> None:
        """Those that are trained now: a layer may be unfrozen later, a group of parameters added."""
        for parameter in (*self._parameters, *(p for optimizer in self._optimizers for p in _trained_by(optimizer))):
            if parameter.requires_grad and self._guarded.get(parameter) is None:
                self._guarded.put(parameter, True)
                parameter.register_hook(self._unscaled)
        for optimizer in self._optimizers:
            if self._guarded.get(optimizer) is None:
                self._guarded.put(optimizer, True)
                optimizer.step = self._guarded_step(optimizer, optimizer.step)

    def _unscaled(self, gradient: Any) -> Any:
        return gradient / self.scale if self._scaling else gradient  # a power of two: exact

    def _guarded_step(self, optimizer: Any, step: Any) -> Any:
        @functools.wraps(step)
        def step_if_finite(*args: Any, **kwargs: Any) -> Any:
            if not self.is_on:
                return step(*args, **kwargs)
            gradients = [p.grad for p in _trained_by(optimizer) if p.grad is not None]
            if gradients and not torch.stack(torch._foreach_norm(gradients)).isfinite().all():
                self.scale, self._good = self.scale / 2, 0
                return None
            self._good += 1
            if self._good % self.GROW_AFTER == 0:
                self.scale *= 2
            return step(*args, **kwargs)

        return step_if_finite


def _trained_by(optimizer: Any) -> Iterator[Any]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _leaves_it_open(group: dict[str, Any]) -> bool:
    """Whether the script has chosen no way of stepping."""
    return group.get("fused") is None and group.get("foreach") is None and not group.get("differentiable")
