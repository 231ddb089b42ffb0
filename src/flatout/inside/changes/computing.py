"""Changes to what is computed: the optimizer's kernels at its construction, the rest around a root module's calls.

Autocast is entered anew for each call of a root, never for the process: cached casts of weights would go stale. What
comes out is float32 again, as it was, so that the script's loss is computed as before.
"""

from __future__ import annotations

import functools
import gc
import inspect
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from flatout.inside.calls import caller
from flatout.inside.changes.ledger import Ledger
from flatout.inside.fingerprints import FingerprintLog
from flatout.inside.inductor_rounding import draw_as_this, round_as_eager
from flatout.inside.patches import Subscriber, original
from flatout.inside.root_modules import Call, RootModules, WeakIdMap
from flatout.model.changes import named

_AT_ROOTS = named(moment="model call")
_HAVE_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
_CAPTURING = ("reduce-overhead", "max-autotune")  # ways to compile that make CUDA graphs


class Computing:
    """The plan's changes to model and optimizer; a `proof` is told what reaches a root module."""

    def __init__(
        self,
        ledger: Ledger,
        changes: Subscriber,
        roots: RootModules,
        proof: FingerprintLog | None = None,
    ) -> None:
        self._ledger = ledger
        self._changes = changes
        self._roots = roots
        self._proof = proof
        self.optimizers = WeakIdMap()
        self._scaler: LossScale | None = None
        self._frozen = False
        self.compile_s = 0.0  # the first calls of what we compiled

    def install(self) -> None:
        """Put the patches in place that the plan needs."""
        wanted = self._ledger.wanted
        if wanted("fused_optimizer"):
            for kind in _HAVE_FUSED:
                self._build_fused(kind)
        self._changes.after("torch.optim.optimizer.Optimizer.__init__", self._optimizer_built)
        if any(wanted(name) for name in _AT_ROOTS) or self._proof is not None:
            self._roots.start_changing(self._changes, self._around)

    def device(self) -> torch.device | None:
        """Where the parameters are that an optimizer trains; None where that is in several places, or nowhere yet."""
        places = {
            p.device for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]
        }
        return places.pop() if len(places) == 1 else None

    def finish(self) -> None:
        """The run is over: what has had no occasion says why."""
        if self._frozen:
            gc.unfreeze()
        for name in filter(self._ledger.wanted, _AT_ROOTS):
            self._ledger.refused(name, self._roots.why_none())

    # -- the optimizer ----------------------------------------------------------------------------------------------

    def _optimizer_built(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.optimizers.put(optimizer)
        if self._ledger.wanted("fused_optimizer") and not isinstance(optimizer, _HAVE_FUSED):
            self._ledger.refused("fused_optimizer", f"{type(optimizer).__name__} has no fused form in torch")

    def _build_fused(self, kind: Any) -> None:
        where = f"{kind.__module__}.{kind.__qualname__}.__init__"
        signature = inspect.signature(kind.__init__)

        def build(init: Call, optimizer: Any, params: Any, *args: Any, **kwargs: Any) -> None:
            params = list(params)  # to be gone through twice, should the first time fail
            given = signature.bind_partial(optimizer, params, *args, **kwargs).arguments
            if given.get("fused") is None and given.get("foreach") is None and not given.get("differentiable"):
                try:
                    init(optimizer, params, *args, **{**kwargs, "fused": True})
                except Exception as problem:  # sparse or integer parameters, a device without it
                    self._ledger.refused("fused_optimizer", str(problem))
                else:
                    self._ledger.made("fused_optimizer", f"{kind.__name__}(…, fused=True)", caller())
                    return
            elif not given.get("fused"):
                self._ledger.refused("fused_optimizer", "the script chooses another way of stepping itself")
            init(optimizer, params, *args, **kwargs)

        self._changes.around(where, build)

    @property
    def wants_a_step(self) -> bool:
        return not self._frozen and self._ledger.wanted("gc_freeze") is not None

    def step_ended(self) -> None:
        """A training step is over: what lives now lives long."""
        if self.wants_a_step:
            self._frozen = True
            if self._ledger.attempt("gc_freeze", _collect_and_freeze) is not None:
                self._ledger.made("gc_freeze", "what lived after the first step is left out of garbage collections")

    # -- around a root module ---------------------------------------------------------------------------------------

    def _around(self, module: Any, call: Call) -> Call:
        """How a root is to be called: each change in turn, the proof's look at the inputs outermost."""
        where = caller()
        for name, make in (
            ("cudnn_benchmark", self._benchmark),
            ("compile", self._compiled),  # innermost: the compiler is to see nothing of ours
            ("channels_last", self._channels_last),
            ("precision", self._precise),
        ):
            if self._ledger.wanted(name):
                changed = self._ledger.attempt(name, make, module, call, where)
                call = changed if changed is not None else call
        return call if self._proof is None else self._looked_at(module, call, self._proof)

    def _looked_at(self, module: Any, call: Call, proof: FingerprintLog) -> Call:
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

    def _benchmark(self, module: Any, call: Call, where: str | None) -> Call:
        if not torch.cuda.is_available():
            self._ledger.refused("cudnn_benchmark", "there is no GPU")
        elif torch.are_deterministic_algorithms_enabled() or torch.backends.cudnn.deterministic:
            self._ledger.refused("cudnn_benchmark", "the script asks for deterministic algorithms")
        elif torch.backends.cudnn.benchmark:
            self._ledger.refused("cudnn_benchmark", "it is on already")
        else:
            torch.backends.cudnn.benchmark = True
            self._ledger.made("cudnn_benchmark", "torch.backends.cudnn.benchmark = True", where)
        return call

    def _channels_last(self, module: Any, call: Call, where: str | None) -> Call:
        pictures = [p for p in module.parameters() if p.dim() == 4]
        if all(p.is_contiguous(memory_format=torch.channels_last) for p in pictures):
            already = (
                "the model is in channels_last already" if pictures else "the model has no convolutions over pictures"
            )
            self._ledger.refused("channels_last", already)
            return call
        module.to(memory_format=torch.channels_last)
        for optimizer in self.optimizers:  # a state loaded before the first step has to lie as its parameter does
            for state in optimizer.state.values():
                for key, value in state.items():
                    state[key] = _laid_out(value)
        self._ledger.made(
            "channels_last", "model.to(memory_format=torch.channels_last), and 4-d inputs likewise", where
        )

        def call_laid_out(*args: Any, **kwargs: Any) -> Any:
            return call(*map(_laid_out, args), **{name: _laid_out(value) for name, value in kwargs.items()})

        return call_laid_out

    def _compiled(self, module: Any, call: Call, where: str | None) -> Call:
        change = self._ledger.wanted("compile")
        assert change is not None
        if hasattr(module, "_orig_mod") or call != module._call_impl:
            self._ledger.refused("compile", "the script compiles the model itself")
            return call
        round_as_eager()
        compiled = original(torch.compile)(
            _visible(module, call), mode=None if change.value == "default" else change.value
        )
        self._ledger.made("compile", f"model.compile(mode={change.value!r})", where)
        captured = change.value in _CAPTURING
        stop_looking = _refuse_to_add_up(module) if captured else None
        went_well, seen = False, self._proof is None

        def call_compiled(*args: Any, **kwargs: Any) -> Any:
            nonlocal compiled, went_well, captured, seen
            if not seen:
                seen = module.training and torch.is_grad_enabled()
                with draw_as_this():
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

    def _precise(self, module: Any, call: Call, where: str | None) -> Call:
        change = self._ledger.wanted("precision")
        assert change is not None
        parameters = list(module.parameters())
        device = parameters[0].device.type
        if change.value == "tf32":
            if _allow_tf32():
                self._ledger.made("precision", "TF32 for matrix products and convolutions", where)
            else:
                self._ledger.refused("precision", "TF32 is on already")
            return call
        dtype = torch.bfloat16 if change.value == "bf16" else torch.float16
        why_not = _why_no_autocast(parameters, device, dtype)
        if why_not:
            self._ledger.refused("precision", why_not)
            return call
        if dtype == torch.float16:
            self._scaler = self._scaler or LossScale(self._changes)
            self._scaler.guard(parameters, self.optimizers)
        self._ledger.made("precision", f"each call of the model under torch.autocast({device!r}, {dtype})", where)

        def call_in_autocast(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast(device, dtype=dtype):
                result = call(*args, **kwargs)
            return tree_map_only(torch.Tensor, functools.partial(_as_float, dtype), result)

        return call_in_autocast


def _visible(module: Any, call: Call) -> Call:
    """A call the compiler will look into: of torch's own files it does so only from a frame outside them."""
    from torch._dynamo import external_utils, trace_rules

    return external_utils.wrap_inline(call) if trace_rules.check(module.forward) else call


def _refuse_to_add_up(module: torch.nn.Module) -> Callable[[], None]:
    """End a run that adds gradients of several passes: those of CUDA graphs are written over by the next pass, and what
    was added up would be wrong without a word. Returns what takes this back.

    Looked at is the parameter that has the first gradient of all: some may never have one.
    """
    handles: dict[torch.nn.Parameter, Any] = {}

    def look(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
        for other in [other for other in handles if other is not parameter]:
            handles.pop(other).remove()
        if parameter.grad is not None:
            raise RuntimeError("gradients of several passes are added up, and CUDA graphs would write over them")

    def stop() -> None:
        for handle in handles.values():
            handle.remove()
        handles.clear()

    for parameter in module.parameters():
        if parameter.requires_grad:
            handles[parameter] = parameter.register_hook(functools.partial(look, parameter))
    return stop


def _collect_and_freeze() -> bool:
    gc.collect()
    gc.freeze()
    return True


def _laid_out(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dim() == 4:
        return value.contiguous(memory_format=torch.channels_last)
    return value


def _as_float(dtype: torch.dtype, tensor: Any) -> Any:
    return tensor.float() if tensor.dtype == dtype else tensor


def _allow_tf32() -> bool:
    """Through the interface the script has used: the old one cannot even be read after the new one was touched.

    Whether anything had to be changed.
    """
    matmul: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    try:
        if matmul.allow_tf32 and cudnn.allow_tf32:
            return False
    except RuntimeError:
        matmul.fp32_precision = cudnn.conv.fp32_precision = cudnn.rnn.fp32_precision = "tf32"
    else:
        matmul.allow_tf32 = cudnn.allow_tf32 = True
    return True


def _why_no_autocast(parameters: list[Any], device: str, dtype: torch.dtype) -> str:
    if torch.is_autocast_enabled(device):
        return "the script runs the model under autocast itself"
    if any(p.dtype != torch.float32 for p in parameters if p.is_floating_point()):
        return "the model's parameters are not float32"
    if dtype == torch.float16 and device != "cuda":
        return "float16 is for GPUs; a CPU has bfloat16"
    if device == "cuda" and dtype == torch.bfloat16 and not torch.cuda.is_bf16_supported(including_emulation=False):
        return "this card has no bfloat16: float16 is what it has"
    return ""


class LossScale:
    """What a GradScaler does, from outside: losses are scaled before `backward`, gradients unscaled as they arrive.

    So every gradient the script sees (to clip, to log) has its true size. A step whose gradients are not finite is
    skipped, and the scale halved; after many good ones it is doubled.
    """

    FIRST, GROW_AFTER = 2.0**16, 2000

    def __init__(self, changes: Subscriber) -> None:
        self.scale = self.FIRST
        self._good = 0
        self._scaling = False
        self._guarded, self._parameters, self._optimizers = WeakIdMap(), WeakIdMap(), WeakIdMap()
        changes.around("torch.autograd.backward", self._backward)

    def _backward(self, call: Call, tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(tensors, torch.Tensor) or tensors.numel() != 1 or grad_tensors is not None:
            return call(tensors, grad_tensors, *args, **kwargs)
        self._guard()
        self._scaling = True
        try:
            return call(tensors, torch.full_like(tensors, self.scale), *args, **kwargs)
        finally:
            self._scaling = False

    def guard(self, parameters: list[Any], optimizers: WeakIdMap) -> None:
        """Unscale what arrives at these parameters and those of the optimizers, which look at it before they step."""
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
