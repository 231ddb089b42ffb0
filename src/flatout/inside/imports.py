"""Actions that follow the import of a module: torch, argparse, numpy … A finder at the head of `sys.meta_path`."""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from flatout.launch.protocol import Options, note_not_measured
from flatout.model.errors import FlatoutError
from flatout.redact import redact_text

_finder: _AfterImport | None = None


def watch_imports() -> bool:
    """Start watching imports; False where that has happened before."""
    global _finder
    if _finder is not None:
        return False
    _finder = _AfterImport()
    return True


def when_imported(name: str, action: Callable[[ModuleType], None]) -> None:
    """Call `action` once `name` has been imported, now if it has been already."""
    if _finder is not None:
        _finder.when(name, action)
    elif name in sys.modules:
        action(sys.modules[name])


def not_measured(problem: Exception) -> None:
    """Say why nothing is recorded of this process; once, if others of the command have the same reason."""
    if isinstance(problem, FlatoutError):
        reason = str(problem)
    else:
        reason = f"{type(problem).__name__}: {problem}"
    reason = redact_text(reason)
    options = Options.from_environment(os.environ)
    if options is None or note_not_measured(options.folder, reason):
        print(f"flatout: not measuring this process ({reason})", file=sys.stderr)


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

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self._actions or self._finding:
            return None
        self._finding = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._finding = False
        if spec is not None and spec.loader is not None:
            self._act_after(name, spec.loader)
        return spec

    def _act_after(self, name: str, loader: Any) -> None:
        """Act once this loader has executed its module: not yet, as transformers only asks whether there is a torch."""
        execute = loader.exec_module

        def execute_and_act(module: ModuleType) -> None:
            del loader.exec_module
            execute(module)
            for action in self._actions.pop(name, ()):
                _safely(action, module)

        loader.exec_module = execute_and_act


def _safely(action: Callable[[ModuleType], None], module: ModuleType) -> None:
    try:
        action(module)
    except Exception as problem:
        not_measured(problem)
