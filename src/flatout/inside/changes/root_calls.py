"""The modules a script calls, known at their first call, and what goes around each call of one.

When an optimizer is made, every module that holds some of its parameters is armed, through `_compiled_call_impl`: an
attribute that pickling and copying leave out. The outermost one that is called fires first: it is a root, its parts
are disarmed, and from then on the plan's work is done around its calls. Nothing is left in the way of torch.compile:
what the script compiles itself is disarmed first and, if it is a module, armed again as a whole.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

Call = Callable[..., Any]
Around = Callable[[Any, Call], Call]  # (module, how it is called) -> how it is to be called


class RootCalls:
    """Arms modules, and wraps the call of those that turn out to be roots by `around`, once each."""

    def __init__(self, around: Around) -> None:
        self._around = around
        self._compiles_functions = False
        self.inside = False

    def install(self) -> None:
        """Watch for optimizers, and for the script compiling on its own account."""
        optimizer_class: Any = torch.optim.Optimizer
        module_class: Any = torch.nn.Module
        init, compile_, compile_module = optimizer_class.__init__, torch.compile, module_class.compile

        @functools.wraps(init)
        def build(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            init(optimizer, *args, **kwargs)
            self.arm(p for group in optimizer.param_groups for p in group["params"])

        @functools.wraps(compile_)
        def compile_anything(model: Any = None, *args: Any, **kwargs: Any) -> Any:
            if isinstance(model, torch.nn.Module):
                was_armed = self._disarm(model)
                compiled = compile_(model, *args, **kwargs)
                if was_armed:
                    self._arm(compiled)
                return compiled
            self._compiles_functions = True  # what it calls is not known: nothing of ours may be in there
            for module in _modules_alive():
                self._disarm(module)
            return compile_(model, *args, **kwargs)

        @functools.wraps(compile_module)
        def compile_in_place(module: Any, *args: Any, **kwargs: Any) -> None:
            was_armed = self._disarm(module)
            impl = compile_(module._call_impl, *args, **kwargs)
            module._compiled_call_impl = impl
            if was_armed:
                self._arm(module)

        optimizer_class.__init__ = build
        torch.compile = compile_anything
        module_class.compile = compile_in_place

    def why_none(self) -> str:
        """Why no root may have been found."""
        if self._compiles_functions:
            return "the script compiles a function of its own, and what is called in there is not ours to change"
        return "no module that an optimizer trains was called"

    def arm(self, parameters: Iterable[Any]) -> None:
        """Arm every module that holds some of these parameters."""
        if self._compiles_functions:
            return
        trained = {id(parameter) for parameter in parameters}
        armed = [m for m in _modules_alive() if any(id(p) in trained for p in m.parameters())]
        compiled = {id(part) for m in armed if _is_compiled(m) for part in m.modules() if part is not m}
        for module in armed:
            if id(module) not in compiled:
                self._arm(module)

    def _arm(self, module: Any) -> None:
        inner = vars(module).get("_compiled_call_impl")
        if not isinstance(inner, _RootCall | torch.jit.ScriptModule):
            vars(module)["_compiled_call_impl"] = _RootCall(self, module, inner)

    def _disarm(self, module: Any) -> bool:
        """Take our mark off a module and its parts; whether it had one."""
        had_one = False
        for part in module.modules():
            call = vars(part).get("_compiled_call_impl")
            if isinstance(call, _RootCall):
                had_one = had_one or part is module
                call.take_off()
        return had_one

    def first_call(self, module: Any, call: Call) -> Call:
        """A root is called for the first time: its parts are no roots. How it is to be called from now on."""
        for part in module.modules():
            mark = vars(part).get("_compiled_call_impl")
            if part is not module and isinstance(mark, _RootCall):
                mark.take_off()
        return self._around(module, call)


class _RootCall:
    """Stands where a module keeps its compiled call. Where it is pickled or copied after all, it becomes None."""

    def __init__(self, calls: RootCalls, module: Any, inner: Any) -> None:
        self._calls = calls
        self._module = weakref.ref(module)
        self._inner = inner
        self._call: Call | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None, "a module is calling itself"
        plain: Call = self._inner if self._inner is not None else module._call_impl
        if torch.compiler.is_compiling() or self._calls.inside:
            return plain(*args, **kwargs)
        if self._call is None:
            self._call = self._calls.first_call(module, plain)
        self._calls.inside = True
        try:
            return self._call(*args, **kwargs)
        finally:
            self._calls.inside = False

    def take_off(self) -> None:
        """Leave the module as it was. One that another mark (a timer) lies upon stays, and lets everything through."""
        module = self._module()
        self._call = self._inner if self._inner is not None else None
        if module is not None and vars(module).get("_compiled_call_impl") is self:
            if self._inner is None:
                del vars(module)["_compiled_call_impl"]
            else:
                vars(module)["_compiled_call_impl"] = self._inner

    def __reduce__(self) -> Any:
        return type(None), ()


def _is_compiled(module: Any) -> bool:
    inner = vars(module).get("_compiled_call_impl")
    return hasattr(module, "_orig_mod") or (inner is not None and not isinstance(inner, _RootCall))


def _modules_alive() -> list[Any]:
    """Every module there is, found by looking through all objects: slow, for an optimizer's construction only."""
    module = torch.nn.Module
    return [thing for thing in gc.get_objects() if issubclass(type(thing), module)]  # isinstance wakes lazy objects
