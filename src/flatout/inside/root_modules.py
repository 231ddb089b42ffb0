"""The modules a script calls, and what goes around each call: a mark where a module keeps its compiled call.

timed    after the first step, the modules that are part of no other; the parts of those that are never called
         (a LightningModule). A hook on every layer would cost more than the layer.
changed  when an optimizer is made, every module that holds some of its parameters is armed. The outermost one that
         is called is a root: its parts are disarmed, and a plan's changes go around its calls.
"""

from __future__ import annotations

import functools
import gc
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_dynamo_compiling

from flatout.inside.patches import Subscriber
from flatout.inside.recorder import OWN, Recorder

if TYPE_CHECKING:
    from flatout.inside.flops import FlopCount

_MODULE = "torch.nn.modules.module.Module"
_LOOKS = 4

Call = Callable[..., Any]
Around = Callable[[Any, Call], Call]  # (module, how it is called) -> how it is to be called


class WeakIdMap:
    """Things and a value for each, for as long as they live; by identity, not by the user's own `==`."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], Any]] = {}
        self._crowded = 1024

    def put(self, thing: Any, value: Any = None) -> None:
        """Add one."""
        self._entries[id(thing)] = (weakref.ref(thing), value)
        if len(self._entries) > self._crowded:
            self._entries = {key: entry for key, entry in self._entries.items() if entry[0]() is not None}
            self._crowded = 2 * len(self._entries) + 1024

    def get(self, thing: Any) -> Any:
        """The value of one, or None where it has not been added."""
        entry = self._entries.get(id(thing))
        return entry[1] if entry is not None and entry[0]() is thing else None

    def __iter__(self) -> Iterator[Any]:
        living = (entry[0]() for entry in list(self._entries.values()))
        return (thing for thing in living if thing is not None)


class RootModules:
    """All modules of this process, and the marks on those that the script calls."""

    def __init__(self) -> None:
        self.made = WeakIdMap()
        self._time: Subscriber | None = None
        self.recorder: Any = None
        self._looks = 0
        self._not_before = 1.0  # so many steps, no look at the modules
        self.next_look = 1.0  # infinite where none were made or compiled since the last
        self._trained: set[int] = set()
        self.inside_timed = False
        self._changes: Subscriber | None = None
        self._around: Around | None = None
        self._script_compiles_functions = False
        self._compiles_in_place = False
        self.inside_changed = False
        self.flops: FlopCount | None = None  # of the calls that learn, in the step that is counted

    def note_living(self) -> None:
        """Note the modules that are there already, by looking through all objects: slow."""
        module = torch.nn.Module
        for thing in gc.get_objects():
            if issubclass(type(thing), module):  # isinstance would load lazy objects
                self.made.put(thing)

    def _note_all(self, user: Subscriber) -> None:
        for name in ("__init__", "__setstate__", "compile"):
            user.after(f"{_MODULE}.{name}", self._note)

    def _note(self, module: Any, *_: Any, **__: Any) -> None:
        self.next_look = self._not_before
        self.made.put(module)

    # -- timed

    def start_timing(self, time: Subscriber, recorder: Recorder) -> None:
        """Time the calls of root modules for this recorder, until `time` leaves."""
        self._time, self.recorder = time, recorder
        self._looks, self._not_before, self.next_look = 0, 1.0, 1.0
        self._trained = set()
        self.inside_timed = False
        self._note_all(time)
        time.on_leaving(self._stop_timing)

    def _stop_timing(self) -> None:
        for module in self.made:
            if (mark := _mark_of(module)) is not None:
                mark.timed = False
                mark.take_off_if_idle()

    def find(self, optimizer: Any) -> None:
        """Look for the modules to time: after the first steps, and ever more rarely when more were made."""
        self._looks += 1
        steps = self.recorder.steps
        if self._looks < _LOOKS:
            self._not_before = self.next_look = steps + 1
        else:
            self._not_before, self.next_look = 2 * steps, math.inf
        self.recorder.push(OWN)
        self._trained |= {id(p) for group in optimizer.param_groups for p in group["params"]}
        modules = [m for m in self.made if any(True for _ in m.parameters())]
        parts = {id(child) for m in modules for child in m.children()}
        for module in modules:
            if id(module) not in parts:
                self._time_called(module)
        self.recorder.pop()

    def _time_called(self, module: Any) -> None:
        """Time a module; its parts instead, where several steps have gone by without a call."""
        mark = _mark_of(module)
        if mark is None or not mark.timed:
            self._time_module(module)
        elif mark.trained and not mark.called:
            for part in _called_parts(module):
                self._time_called(part)

    def _time_module(self, module: Any) -> None:
        mark = _mark_of(module) or _Mark(self, module)
        mark.timed, mark.called = True, False
        mark.trained = any(id(p) in self._trained for p in module.parameters())

    def is_untimed(self) -> bool:
        """Whether a call is not to be timed: it is inside another, in another thread, or all is over."""
        return self.inside_timed or self._time is None or self._time.off or get_ident() != self.recorder.thread

    def begin(self, *, learns: bool, training: bool, trained: bool) -> None:
        """A call that is to be timed begins (see Recorder.forward)."""
        assert self._time is not None
        self.inside_timed = True
        recorder = self.recorder
        if recorder.light:
            self._time.guarded(recorder.look_closely)
        self._time.guarded(recorder.forward, learns=learns, training=training, trained=trained)

    def end(self) -> None:
        """It is over."""
        self.inside_timed = False
        if self._time is not None and not self._time.off:
            self._time.guarded(self.recorder.pop)

    # -- changed

    def start_changing(self, changes: Subscriber, around: Around) -> None:
        """Have `around` say, once for each root module, how it is to be called."""
        self._changes, self._around = changes, around
        self._note_all(changes)
        changes.after("torch.optim.optimizer.Optimizer.__init__", self._optimizer_built)
        changes.around("torch.compile", self._script_compiles)
        changes.around(f"{_MODULE}.compile", self._script_compiles_in_place)
        changes.on_leaving(self._disarm_all)

    def _disarm_all(self) -> None:
        for module in self.made:
            self._disarm_one(module)

    def why_none(self) -> str:
        """Why no root may have been found."""
        if self._script_compiles_functions:
            return "the script compiles a function of its own, and what is called in there is not ours to change"
        return "no module that an optimizer trains was called"

    def _optimizer_built(self, optimizer: Any, *_: Any, **__: Any) -> None:
        if self._script_compiles_functions:
            return
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        armed = [m for m in self.made if any(id(p) in trained for p in m.parameters())]
        compiled = {id(part) for m in armed if _is_compiled(m) for part in m.modules() if part is not m}
        for module in armed:
            if id(module) not in compiled:
                self._arm(module)

    def _arm(self, module: Any) -> None:
        mark = _mark_of(module)
        if mark is None and isinstance(vars(module).get("_compiled_call_impl"), torch.jit.ScriptModule):
            return
        mark = mark or _Mark(self, module)
        mark.armed = True

    def _disarm(self, module: Any) -> bool:
        """Disarm a module and its parts; whether it was armed itself."""
        mark = _mark_of(module)
        was_armed = mark is not None and mark.armed
        for part in module.modules():
            self._disarm_one(part)
        return was_armed

    def _disarm_one(self, module: Any) -> None:
        mark = _mark_of(module)
        if mark is not None:
            mark.armed, mark.changed = False, None
            mark.take_off_if_idle()

    def _script_compiles(self, call: Call, model: Any = None, *args: Any, **kwargs: Any) -> Any:
        if self._compiles_in_place:
            return call(model, *args, **kwargs)
        if isinstance(model, torch.nn.Module):
            was_armed = self._disarm(model)
            compiled = call(model, *args, **kwargs)
            if was_armed:
                self._arm(compiled)
            return compiled
        self._script_compiles_functions = True  # what it calls is not known: nothing of ours may be in there
        self._disarm_all()
        return call(model, *args, **kwargs)

    def _script_compiles_in_place(self, call: Call, module: Any, *args: Any, **kwargs: Any) -> Any:
        was_armed = self._disarm(module)
        self._compiles_in_place = True
        try:
            result = call(module, *args, **kwargs)
        finally:
            self._compiles_in_place = False
        if was_armed:
            self._arm(module)
        return result

    def first_call(self, module: Any, call: Call) -> Call:
        """A root, whose parts are none, is called for the first time: how it is to be called from now on."""
        assert self._changes is not None
        assert self._around is not None
        for part in module.modules():
            if part is not module:
                self._disarm_one(part)
        return self._changes.guarded(self._around, module, call) or call


class _Mark:
    """Stands where a module keeps its compiled call, around what was there. Pickled or copied, it
    becomes None."""

    __slots__ = ("_module", "_roots", "armed", "called", "changed", "inner", "timed", "trained")

    def __init__(self, roots: RootModules, module: Any) -> None:
        self._roots = roots
        self._module = weakref.ref(module)
        self.inner = vars(module).get("_compiled_call_impl")
        self.timed = self.trained = self.called = self.armed = False
        self.changed: Call | None = None
        vars(module)["_compiled_call_impl"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None, "a module is calling itself"
        call = self.inner if self.inner is not None else module._call_impl
        if is_dynamo_compiling():
            return call(*args, **kwargs)
        if self.armed:
            call = functools.partial(self._call_changed, module, call)
        if not self.timed:
            return call(*args, **kwargs)
        roots = self._roots
        learns, training = torch.is_grad_enabled(), module.training
        if roots.recorder.light and learns and training:
            return call(*args, **kwargs)
        if roots.is_untimed():
            return call(*args, **kwargs)
        self.called = True
        if roots.flops is not None and learns:
            call = roots.flops.around(call)
        roots.begin(learns=learns, training=training, trained=self.trained)
        try:
            return call(*args, **kwargs)
        finally:
            roots.end()

    def _call_changed(self, module: Any, plain: Call, /, *args: Any, **kwargs: Any) -> Any:
        roots = self._roots
        if roots.inside_changed:
            return plain(*args, **kwargs)
        if self.changed is None:
            self.changed = roots.first_call(module, plain)
        roots.inside_changed = True
        try:
            return self.changed(*args, **kwargs)
        finally:
            roots.inside_changed = False

    def take_off_if_idle(self) -> None:
        """Leave the module as it was, where nothing is to be done at its calls."""
        module = self._module()
        if self.timed or self.armed or module is None or _mark_of(module) is not self:
            return
        if self.inner is None:
            del vars(module)["_compiled_call_impl"]
        else:
            vars(module)["_compiled_call_impl"] = self.inner

    def __reduce__(self) -> Any:
        return type(None), ()


def _mark_of(module: Any) -> _Mark | None:
    mark = vars(module).get("_compiled_call_impl")
    return mark if isinstance(mark, _Mark) else None


def _is_compiled(module: Any) -> bool:
    mark = _mark_of(module)
    call = vars(module).get("_compiled_call_impl") if mark is None else mark.inner
    return call is not None or hasattr(module, "_orig_mod")


def _called_parts(module: Any) -> Iterable[Any]:
    """The modules right below, and those in lists and dicts of modules, which are never called themselves."""
    for child in module.children():
        if isinstance(child, torch.nn.ModuleList | torch.nn.ModuleDict):
            yield from child.children()
        else:
            yield child
