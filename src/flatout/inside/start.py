"""Runs in every Python process of a launched command, before the user's code. Standard library only until torch is in.

A finder at the head of `sys.meta_path` waits for a few imports; nothing else happens in a process that never trains.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.inside.changes.ledger import Ledger
from flatout.inside.settings import Settings
from flatout.launch import signals
from flatout.launch.protocol import Options
from flatout.model.errors import FlatoutError, UsageError
from flatout.redact import redact_text

if TYPE_CHECKING:
    from flatout.inside.changes.knobs import Knobs
    from flatout.model.plan import Plan

OLDEST_TORCH = (2, 6)

settings = Settings()
ledger = Ledger()
_knobs: Knobs | None = None
_finder: _AfterImport | None = None


def start() -> None:
    """Wait for torch (once a process). `FLATOUT=off` and processes not launched by flatout are left alone."""
    try:
        options = Options.from_environment(os.environ)
        if _finder is None and options is not None:
            signals.tell(os.environ)
            _redirect()
            if options.plan is not None:
                _turn_knobs(options.plan)
            watch_imports()
            when_imported("torch", lambda torch: _torch_is_here(torch, options))
    except Exception as problem:
        _say_no(problem)


def _redirect() -> None:
    """In a trial without an overlay, keep what this process writes away from the user's folders."""
    if not os.environ.get("FLATOUT_REDIRECT"):
        return
    from flatout.inside import redirect
    from flatout.launch.sandbox import REDIRECT, Sandbox

    try:
        sandbox = Sandbox.from_json(os.environ[REDIRECT])
        redirect.install(sandbox)
    except Exception as problem:  # better no trial than one that writes
        print(f"flatout: the trial cannot be kept from writing ({problem})", file=sys.stderr)
        os._exit(1)
    watch_imports()
    when_imported("torch", lambda torch: redirect.redirect_torch(torch, sandbox))
    when_imported("safetensors.torch", lambda module: redirect.redirect_safetensors(module, sandbox))


def _turn_knobs(plan: Plan) -> None:
    """Have values changed as they are read."""
    global ledger, _knobs
    ledger = Ledger(plan.changes)
    if any(change.knob for change in plan.changes):
        from flatout.inside.changes.knobs import Knobs

        _knobs = Knobs(ledger)


def watch_imports() -> None:
    """Record the settings the script reads, and be told of imports."""
    global _finder
    if _finder is None:
        _finder = _AfterImport()
        _finder.when("argparse", _record_arguments)
        _finder.when("yaml", _record_yaml)
        _finder.when("json", _record_json)


def when_imported(name: str, action: Callable[[ModuleType], None]) -> None:
    """Call `action` once `name` has been imported, now if it has been already."""
    if _finder is not None:
        _finder.when(name, action)
    elif name in sys.modules:
        action(sys.modules[name])


def _torch_is_here(torch: Any, options: Options) -> None:
    require_torch(torch)
    if options.trial is not None:
        from flatout.inside import lazy_dynamo

        lazy_dynamo.install(torch)
    from flatout.inside.session import begin

    begin(options, settings, ledger=ledger)


def require_torch(torch: Any) -> None:
    """Refuse a torch whose insides we do not know."""
    major, minor = (int(n) for n in re.findall(r"\d+", torch.__version__)[:2])
    if (major, minor) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise UsageError(f"torch {torch.__version__} is older than {oldest}, the oldest that flatout knows")


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls actions right after certain modules have been executed."""

    def __init__(self) -> None:
        self._actions: dict[str, list[Callable[[ModuleType], None]]] = {}
        self._finding = False
        sys.meta_path.insert(0, self)

    def when(self, name: str, action: Callable[[ModuleType], None]) -> None:
        module = sys.modules.get(name)
        if module is not None and not getattr(module.__spec__, "_initializing", False):
            _safely(action, module)
        else:
            self._actions.setdefault(name, []).append(action)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._actions or self._finding:
            return None
        self._finding = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._finding = False
        if spec is not None and spec.loader is not None:
            # Whoever asks may only want to know whether there is such a module, as transformers does of torch.
            spec.loader = _Loader(spec.loader, lambda module: self._imported(name, module))
        return spec

    def _imported(self, name: str, module: ModuleType) -> None:
        for action in self._actions.pop(name, ()):
            _safely(action, module)


class _Loader(importlib.abc.Loader):
    """The real loader, and then what is to follow."""

    def __init__(self, loader: Any, then: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._then = then

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._then(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _safely(action: Callable[[ModuleType], None], module: ModuleType) -> None:
    try:
        action(module)
    except Exception as problem:
        _say_no(problem)


def _say_no(problem: Exception) -> None:
    what = str(problem) if isinstance(problem, FlatoutError) else f"{type(problem).__name__}: {problem}"
    print(f"flatout: not measuring this process ({redact_text(what)})", file=sys.stderr)


def _record_arguments(argparse: Any) -> None:
    parse = argparse.ArgumentParser.parse_known_args

    def parse_known_args(parser: Any, *args: Any, **kwargs: Any) -> Any:
        result = parse(parser, *args, **kwargs)
        if _knobs is not None:
            _quietly(_knobs.arguments, parser, result[0])
        _quietly(settings.note_arguments, parser, result[0])
        return result

    argparse.ArgumentParser.parse_known_args = parse_known_args


def _record_yaml(yaml: Any) -> None:
    _record_loads("yaml", yaml)


def _record_json(json: Any) -> None:
    _record_loads("json", json)


def _record_loads(source: str, module: Any) -> None:
    load = module.load

    def load_and_note(*args: Any, **kwargs: Any) -> Any:
        result = load(*args, **kwargs)
        stream = args[0] if args else kwargs.get("stream", kwargs.get("fp"))  # yaml's name for it, and json's
        file = getattr(stream, "name", None)
        if _knobs is not None:
            _quietly(_knobs.loaded, source, file, result)
        _quietly(settings.note, source, file, result)
        return result

    module.load = load_and_note


def _quietly(function: Callable[..., None], *args: Any) -> None:
    try:
        function(*args)
    except Exception:
        pass
