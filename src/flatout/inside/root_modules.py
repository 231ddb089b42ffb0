"""Finds the modules the user calls, and times those calls only: a hook on every layer would cost more than the layer.

Module.__init__, __setstate__ ──► noted ──after a step──► those that are part of no other ──► timed
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Iterable, Iterator
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_dynamo_compiling

from flatout.inside.recorder import OWN, Recorder

if TYPE_CHECKING:
    from flatout.inside.hooks import Hooks

_LOOKS = 4


class Alive:
    """Things and a value for each, for as long as they live. By identity: how they compare is the user's affair."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], Any]] = {}
        self._crowded = 1024

    def put(self, thing: Any, value: Any = None) -> None:
        """Take one in."""
        self._entries[id(thing)] = (weakref.ref(thing), value)
        if len(self._entries) > self._crowded:
            self._entries = {key: entry for key, entry in self._entries.items() if entry[0]() is not None}
            self._crowded = 2 * len(self._entries) + 1024

    def get(self, thing: Any) -> Any:
        """The value of one, or None where it has not been taken in."""
        entry = self._entries.get(id(thing))
        return entry[1] if entry is not None and entry[0]() is thing else None

    def __iter__(self) -> Iterator[Any]:
        living = (entry[0]() for entry in list(self._entries.values()))
        return (thing for thing in living if thing is not None)


class Roots:
    """Every module made is noted (weakly). After the first step the ones that are part of no other are wrapped through
    `_compiled_call_impl`, which pickling and copying leave out, and which works around a compiled module from the
    outside. Of those that are trained but never called (a LightningModule calls its parts) the children are wrapped.
    """

    def __init__(self, hooks: Hooks, recorder: Recorder) -> None:
        self._hooks = hooks
        self._recorder = recorder
        self.made = Alive()
        self._looks = 0
        self._not_before = 1.0  # a look at the modules, by the count of steps
        self.next_look = 1.0  # never, where none have been made or compiled since the last
        self._trained: set[int] = set()
        self.inside = False

    def watch(self, made: Iterable[Any]) -> None:
        """Note every module made from now on, beside those that are there."""
        for name in ("__init__", "__setstate__", "compile"):
            self._noting(name)
        for module in made:
            self._note(module)

    def _noting(self, name: str) -> None:
        original = getattr(torch.nn.Module, name)

        @functools.wraps(original)
        def noted(module: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(module, *args, **kwargs)
            if not is_dynamo_compiling() and not self._hooks.off:
                self._hooks.guarded(self._note, module)
            return result

        self._hooks.replace(torch.nn.Module, name, noted)

    def _note(self, module: Any) -> None:
        self.next_look = self._not_before
        self.made.put(module)

    def find(self, optimizer: Any) -> None:
        """Look at the modules: after the first steps, and later, ever more rarely, when some were made."""
        self._looks += 1
        steps = self._recorder.steps
        self._not_before = steps + 1 if self._looks < _LOOKS else 2 * steps
        self.next_look = self._not_before if self._looks < _LOOKS else math.inf
        self._recorder.push(OWN)
        self._trained |= {id(p) for group in optimizer.param_groups for p in group["params"]}
        modules = [m for m in self.made if any(True for _ in m.parameters())]
        parts = {id(child) for m in modules for child in m.children()}
        for module in modules:
            if id(module) not in parts:
                self._wrap_called(module)
        self._recorder.pop()

    def _wrap_called(self, module: Any) -> None:
        """Wrap a module; its parts instead, where several steps have gone by without a call."""
        timed = vars(module).get("_compiled_call_impl")
        if not isinstance(timed, _TimedCall):
            self._wrap(module)
        elif timed.trained and not timed.called:
            for part in _called_parts(module):
                self._wrap_called(part)

    def _wrap(self, module: Any) -> None:
        inner = vars(module).get("_compiled_call_impl")
        trained = any(id(p) in self._trained for p in module.parameters())
        timed = _TimedCall(self, self._recorder, module, inner, trained)
        vars(module)["_compiled_call_impl"] = timed
        self._hooks.on_removal(functools.partial(_unwrap, weakref.ref(module), timed, inner))

    def is_off(self) -> bool:
        """Whether a call is none of ours to time: it is inside another, in another thread, or all is over."""
        return self.inside or self._hooks.off or get_ident() != self._recorder.thread

    def begin(self, **how: bool) -> None:
        """A call that is to be timed begins (see Recorder.forward)."""
        self.inside = True
        if self._recorder.light:
            self._hooks.guarded(self._recorder.look_closely)
        self._hooks.guarded(functools.partial(self._recorder.forward, **how))

    def end(self) -> None:
        """It is over."""
        self.inside = False
        if not self._hooks.off:
            self._hooks.guarded(self._recorder.pop)


class _TimedCall:
    """Stands where a module keeps its compiled call. Where it is pickled or copied after all, it becomes None."""

    def __init__(self, roots: Roots, recorder: Recorder, module: Any, inner: Any, trained: bool) -> None:
        self._roots = roots
        self._recorder = recorder
        self._module = weakref.ref(module)
        self._inner = inner
        self.trained = trained
        self.called = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None, "a module is calling itself"
        call = self._inner if self._inner is not None else module._call_impl
        if is_dynamo_compiling():
            return call(*args, **kwargs)
        learns, training = torch.is_grad_enabled(), module.training
        if self._recorder.light and learns and training:
            return call(*args, **kwargs)
        if self._roots.is_off():
            return call(*args, **kwargs)
        self.called = True
        self._roots.begin(learns=learns, training=training, trained=self.trained)
        try:
            return call(*args, **kwargs)
        finally:
            self._roots.end()

    def __reduce__(self) -> Any:
        return type(None), ()


def _unwrap(module: weakref.ref[Any], timed: _TimedCall, inner: Any) -> None:
    owner = module()
    if owner is None or vars(owner).get("_compiled_call_impl") is not timed:
        return
    if inner is None:
        del vars(owner)["_compiled_call_impl"]
    else:
        vars(owner)["_compiled_call_impl"] = inner


def _called_parts(module: Any) -> Iterable[Any]:
    """The modules right below, looking through lists and dicts of modules, which are never called themselves."""
    for child in module.children():
        if isinstance(child, torch.nn.ModuleList | torch.nn.ModuleDict):
            yield from child.children()
        else:
            yield child
