"""Changes to what is computed, each made at its moment: when an optimizer is built, at the first call
of a root module, or when a step ends. From then on it may be switched between two steps."""

from __future__ import annotations

import atexit
import functools
import gc
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import _device_dtype_check_for_fused
from torch.utils._pytree import tree_map_only

from flatout.inside.changes.ledger import Ledger, LiveChange
from flatout.inside.compiler import draw_as_eager, round_as_eager
from flatout.inside.fingerprints import FingerprintLog
from flatout.inside.patches import Subscriber, original
from flatout.inside.root_modules import Call, RootModules, WeakIdMap
from flatout.inside.stacks import caller, raised_at

_HAVE_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
_CAPTURING = ("reduce-overhead", "max-autotune")  # ways to compile that make CUDA graphs


class Computing:
    """The plan's changes to model and optimizer; a `proof` is told what reaches a root module."""

    def __init__(
        self, ledger: Ledger, patches: Subscriber, roots: RootModules, proof: FingerprintLog | None = None
    ) -> None:
        self.ledger = ledger
        self.patches = patches
        self.proof = proof
        self.optimizers = WeakIdMap()
        self.compile_s = 0.0  # what the first calls of compiled models took
        self.on_trial = ""  # the change that is tried in turns: a forward that fails with it is repeated without
        self._roots = roots
        # The first is innermost: the compiler is to see nothing of ours.
        kinds = (CudnnBenchmark, Compile, ChannelsLast, PrecisionChange)
        self._at_roots: list[RootChange] = [kind(self) for kind in kinds if ledger.wanted(kind.name)]
        self._fused = FusedOptimizer(self) if ledger.wanted(FusedOptimizer.name) else None
        self._freeze = GcFreeze(ledger) if ledger.wanted(GcFreeze.name) else None
        others = (change for change in (self._fused, self._freeze) if change is not None)
        self.live: dict[str, LiveChange] = {change.name: change for change in (*self._at_roots, *others)}

    def install(self) -> None:
        """Put the patches in place that the plan needs."""
        self.patches.after("torch.optim.optimizer.Optimizer.__init__", self._optimizer_built)
        if self._at_roots or self.proof is not None:
            self._roots.start_changing(self.patches, self._around)

    def device(self) -> torch.device | None:
        """Where the trained parameters are; None where that is several devices, or not known yet."""
        places = {parameter.device for optimizer in self.optimizers for parameter in _trained_by(optimizer)}
        return places.pop() if len(places) == 1 else None

    def finish(self) -> None:
        """The run is over: what has had no occasion says why."""
        if self._freeze is not None:
            self._freeze.off()
        for change in self._at_roots:
            self.ledger.refused(change.name, self._roots.why_none())

    def step_ended(self) -> None:
        """A training step is over: what lives now lives long."""
        if self._freeze is not None and self._freeze.is_wanted:
            self.ledger.attempt(GcFreeze.name, self._freeze.switched)

    def _optimizer_built(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.optimizers.put(optimizer)
        if self._fused is not None:
            self.ledger.attempt(FusedOptimizer.name, self._fused.built, optimizer, caller())

    def _around(self, module: Any, call: Call) -> Call:
        """How a root is to be called: each change in turn, the proof's look at the inputs outermost."""
        where = caller()
        for change in self._at_roots:
            if change.is_wanted:
                call = change.around(module, call, where)
        if self.proof is not None:
            call = _looked_at(module, call, self.proof)
        return call


class _ModelChange(LiveChange):
    """A change that needs to know the optimizers, or other changes."""

    def __init__(self, computing: Computing) -> None:
        super().__init__(computing.ledger)
        self.computing = computing


class RootChange(_ModelChange):
    """A change around the calls of root modules, made at the first one while it is on."""

    def around(self, module: Any, call: Call, where: str | None) -> Call:
        """How a root module is to be called from now on."""
        changed: Call | None = None

        def call_as_switched(*args: Any, **kwargs: Any) -> Any:
            nonlocal changed
            if not self.is_on:
                return call(*args, **kwargs)
            if changed is None:
                changed = self.ledger.attempt(self.name, self._changed, module, call, where) or call
            try:
                return changed(*args, **kwargs)
            except Exception as problem:
                if self.computing.on_trial != self.name:
                    raise
                self.ledger.failed(self.name, problem, raised_at(problem.__traceback__))
                self.off()
                return call(*args, **kwargs)

        return call_as_switched

    def _changed(self, module: Any, call: Call, where: str | None) -> Call | None:
        """How it is called while the change is on; None where the call stays."""
        raise NotImplementedError


class CudnnBenchmark(RootChange):
    """torch.backends.cudnn.benchmark, for the process."""

    name = "cudnn_benchmark"
    _ours = False

    def _changed(self, module: Any, call: Call, where: str | None) -> None:
        if not torch.cuda.is_available():
            self.refused("there is no GPU")
        elif torch.are_deterministic_algorithms_enabled() or torch.backends.cudnn.deterministic:
            self.refused("the script asks for deterministic algorithms")
        elif torch.backends.cudnn.benchmark:
            self.refused("it is on already")
        else:
            self._ours = True
            self.made("torch.backends.cudnn.benchmark = True", where)
            self.switched()

    def switched(self) -> None:
        if self._ours:
            torch.backends.cudnn.benchmark = self.is_on


class ChannelsLast(RootChange):
    """Convolution weights, their optimizer state and 4-d inputs in channels_last."""

    name = "channels_last"

    def __init__(self, computing: Computing) -> None:
        super().__init__(computing)
        self._modules = WeakIdMap()

    def _changed(self, module: Any, call: Call, where: str | None) -> Call | None:
        images = [p for p in module.parameters() if p.dim() == 4]
        if not images:
            self.refused("the model has no convolutions over pictures")
            return None
        if all(p.is_contiguous(memory_format=torch.channels_last) for p in images):
            self.refused("the model is in channels_last already")
            return None
        self._modules.put(module)
        self.switched()
        self.made("model.to(memory_format=torch.channels_last), and 4-d inputs likewise", where)

        def call_laid_out(*args: Any, **kwargs: Any) -> Any:
            return call(*map(_in_channels_last, args), **{key: _in_channels_last(one) for key, one in kwargs.items()})

        return call_laid_out

    def switched(self) -> None:
        memory_format = torch.channels_last if self.is_on else torch.contiguous_format
        for module in self._modules:
            module.to(memory_format=memory_format)
        for optimizer in self.computing.optimizers:  # a state has to lie as its parameter does
            for state in optimizer.state.values():
                for key, value in state.items():
                    if isinstance(value, torch.Tensor) and value.dim() == 4:
                        state[key] = value.contiguous(memory_format=memory_format)


class Compile(RootChange):
    """torch.compile of the root module; switched off, it is called as it was written."""

    name = "compile"

    def _changed(self, module: Any, call: Call, where: str | None) -> Call | None:
        if hasattr(module, "_orig_mod") or call != module._call_impl:
            self.refused("the script compiles the model itself")
            return None
        round_as_eager()
        mode = None if self.value == "default" else self.value
        compiled = original(torch.compile)(_visible(module, call), mode=mode)
        self.made(f"model.compile(mode={self.value!r})", where)
        captured = self.value in _CAPTURING
        if captured:
            self._refuse_to_add_up(module)
        went_well, seen = False, self.computing.proof is None

        def call_compiled(*args: Any, **kwargs: Any) -> Any:
            nonlocal went_well, seen
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
                self.ledger.failed(self.name, problem)
                self.off()
                return call(*args, **kwargs)
            if not went_well:
                self.computing.compile_s += time.perf_counter() - start_s
                went_well = True
            # Graphs write over what they returned: the script may keep it.
            return tree_map_only(torch.Tensor, torch.clone, result) if captured else result

        return call_compiled

    def _refuse_to_add_up(self, module: torch.nn.Module) -> None:
        """End a run that adds up gradients: CUDA graphs write over those of the pass before, unseen.

        Only the parameter with the first gradient of all is looked at: some may never have one.
        """
        handles: dict[torch.nn.Parameter, Any] = {}

        def look(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
            for other in [other for other in handles if other is not parameter]:
                handles.pop(other).remove()
            if self.is_on and parameter.grad is not None:
                raise RuntimeError("gradients of several passes are added up, and CUDA graphs would write over them")

        for parameter in module.parameters():
            if parameter.requires_grad:
                handles[parameter] = parameter.register_hook(functools.partial(look, parameter))


class PrecisionChange(RootChange):
    """TF32 for the process; bf16 and fp16 by autocast around each call of a root, whose result is
    float32 again.

    Autocast is never entered for the process: cached casts of weights would become stale.
    """

    name = "precision"
    _scaler: LossScale | None = None
    _tf32_before: tuple[tuple[Any, str, Any], ...] = ()

    def _changed(self, module: Any, call: Call, where: str | None) -> Call | None:
        if self.value == "tf32":
            self.switched()
            if self._tf32_before:
                self.made("TF32 for matrix products and convolutions", where)
            else:
                self.refused("TF32 is on already")
            return None
        parameters = list(module.parameters())
        device = parameters[0].device.type
        dtype = torch.bfloat16 if self.value == "bf16" else torch.float16
        why_not = _why_no_autocast(parameters, device, dtype)
        if why_not:
            self.refused(why_not)
            return None
        if dtype == torch.float16:
            self._scaler = self._scaler or LossScale(self.computing.patches, self.computing.optimizers)
            self._scaler.guard(parameters)
        self.made(f"each call of the model under torch.autocast({device!r}, {dtype})", where)

        def call_in_autocast(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast(device, dtype=dtype):
                result = call(*args, **kwargs)
            return tree_map_only(torch.Tensor, functools.partial(_as_float, dtype), result)

        return call_in_autocast

    def switched(self) -> None:
        if self._scaler is not None:
            self._scaler.is_on = self.is_on
        for owner, switch, before in self._tf32_before:
            setattr(owner, switch, before)
        self._tf32_before = ()
        if self.is_on and self.value == "tf32":
            self._tf32_before = _allow_tf32()


class FusedOptimizer(_ModelChange):
    """fused=True for the optimizers that have it. Switching it off reads step counters from the GPU once."""

    name = "fused_optimizer"

    def __init__(self, computing: Computing) -> None:
        super().__init__(computing)
        self._ours = WeakIdMap()

    def built(self, optimizer: Any, where: str | None) -> None:
        """An optimizer has been built."""
        if not isinstance(optimizer, _HAVE_FUSED):
            self.refused(f"{type(optimizer).__name__} has no fused form in torch")
        elif self.is_on:
            self._fuse(optimizer, where)

    def switched(self) -> None:
        if self.is_on:
            for optimizer in self.computing.optimizers:
                if isinstance(optimizer, _HAVE_FUSED):
                    self._fuse(optimizer)
        else:
            for optimizer in self._ours:
                _set_fused(optimizer, on=False)

    def _fuse(self, optimizer: Any, where: str | None = None) -> None:
        if not all(map(_leaves_it_open, optimizer.param_groups)):
            if not optimizer.param_groups[0].get("fused"):
                self.refused("the script chooses another way of stepping itself")
            return
        try:
            for parameter in _trained_by(optimizer):
                _device_dtype_check_for_fused(parameter)
        except RuntimeError as problem:  # integer parameters, or a device without it
            self.refused(str(problem))
            return
        self._ours.put(optimizer)
        _set_fused(optimizer, on=True)
        self.made(f"{type(optimizer).__name__}(…, fused=True)", where)


class GcFreeze(LiveChange):
    """What lives after the first step is left out of garbage collections."""

    name = "gc_freeze"
    _is_frozen = False

    def switched(self) -> None:
        if self.is_on and not self._is_frozen:
            gc.collect()
            gc.freeze()
            atexit.register(gc.unfreeze)  # else what libraries have at the end looks like a leak to them
            self.made("what lived after the first step is left out of garbage collections")
        elif self._is_frozen and not self.is_on:
            gc.unfreeze()
            atexit.unregister(gc.unfreeze)
        self._is_frozen = self.is_on


def _looked_at(module: Any, call: Call, proof: FingerprintLog) -> Call:
    proof.roots.put(module)

    def look_and_call(*args: Any, **kwargs: Any) -> Any:
        learns = module.training and torch.is_grad_enabled()
        watched = learns or proof.closely
        if watched:
            proof.inputs(args, kwargs, learns=learns)
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


def _allow_tf32() -> tuple[tuple[Any, str, Any], ...]:
    """Allow TF32, by the newer interface where that has been used: the older one cannot be read any more.

    Returns the switches that were set, with what they were.
    """
    matmul: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    allowed: Any = True
    try:
        before = [(owner, "allow_tf32", owner.allow_tf32) for owner in (matmul, cudnn)]
    except RuntimeError:
        allowed = "tf32"
        before = [(owner, "fp32_precision", owner.fp32_precision) for owner in (matmul, cudnn.conv, cudnn.rnn)]
    changed = tuple(entry for entry in before if entry[2] != allowed)
    for owner, switch, _ in changed:
        setattr(owner, switch, allowed)
    return changed


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
    """Scales losses before `backward`, and gradients back as they arrive: the script sees them in
    their true size. After a step whose gradients are not finite, which is skipped, the scale is
    halved; after many good ones doubled."""

    FIRST, GROW_AFTER = 2.0**16, 2000

    def __init__(self, changes: Subscriber, optimizers: WeakIdMap) -> None:
        self.scale = self.FIRST
        self.is_on = True
        self._good = 0
        self._scaling = False
        self._guarded, self._optimizers = WeakIdMap(), optimizers
        changes.around("torch.autograd.backward", self._backward)

    def _backward(self, call: Call, tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
        is_loss = isinstance(tensors, torch.Tensor) and tensors.numel() == 1 and grad_tensors is None
        if not self.is_on or not is_loss:
            return call(tensors, grad_tensors, *args, **kwargs)
        self.guard(())
        self._scaling = True
        try:
            return call(tensors, torch.full_like(tensors, self.scale), *args, **kwargs)
        finally:
            self._scaling = False

    def guard(self, parameters: Iterable[Any]) -> None:
        """Unscale what arrives at these parameters and at those that are trained now, and check it
        before a step.

        Called for every backward pass: a layer may be unfrozen later, a group of parameters added.
        """
        trained = (parameter for optimizer in self._optimizers for parameter in _trained_by(optimizer))
        for parameter in (*parameters, *trained):
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
    """Whether the script has chosen no way of stepping, and the optimizer knows of this one."""
    unsaid = group.get("fused", False) is None and group.get("foreach") is None
    return unsaid and not group.get("differentiable")


def _set_fused(optimizer: Any, *, on: bool) -> None:
    for group in (optimizer.defaults, *optimizer.param_groups):
        group["fused"] = on or None
    optimizer._step_supports_amp_scaling = on
    # The fused kernels count steps on the parameter's own device. All counters move at once: one wait
    # for the GPU.
    counting: dict[torch.device, list[dict[str, Any]]] = {}
    for parameter, state in optimizer.state.items():
        if isinstance(state.get("step"), torch.Tensor):
            counting.setdefault(parameter.device, []).append(state)
    for device, states in counting.items():
        moved = torch.stack([state["step"] for state in states]).to(device if on else "cpu")
        for state, counter in zip(states, moved.unbind(), strict=True):
            state["step"] = counter
