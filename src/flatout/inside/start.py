"""Runs in every Python process of a launched command, before the user's code. Standard library only until
torch is in.

It waits for a few imports; nothing else happens in a process that never trains.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.inside import imports
from flatout.inside.changes.ledger import Ledger
from flatout.inside.imports import not_measured, when_imported
from flatout.launch import signals
from flatout.launch.protocol import Options
from flatout.model.errors import UsageError
from flatout.model.facts import SettingsRead
from flatout.redact import redact_setting

if TYPE_CHECKING:
    from flatout.inside.changes.knobs import Knobs
    from flatout.model.plan import Plan

OLDEST_TORCH = (2, 6)

_CONFIG = re.compile(r"config|settings|options", re.I)
_PYTHONS_OWN = os.path.dirname(os.__file__)  # noqa: PTH120  # there is a module about how Python itself was built
_MOST_SETTINGS = 400
_MOST_ITEMS = 50
_MOST_SOURCES = 20
_LONGEST_TEXT = 300


class Settings:
    """Values the script read from its command line, from YAML and JSON files and from Python config modules."""

    def __init__(self) -> None:
        self.read: list[SettingsRead] = []
        self._looked_at_modules = False

    def note(self, source: str, where: str | None, values: Any, options: dict[str, str] | None = None) -> None:
        """Remember one set of values. Files of installed packages are not the user's settings."""
        if where is not None and "-packages" in str(where):
            return
        if not isinstance(values, dict) or not values or len(self.read) >= _MOST_SOURCES:
            return  # a dataset may read a file a sample
        # A secret that is cut short would no longer look like one: hide it first.
        known = redact_setting("", _cut(values, 10 * _LONGEST_TEXT))
        file = str(where) if where is not None else None
        entry = SettingsRead(source=source, file=file, values=_cut(known), options=options or {})
        if entry not in self.read:
            self.read.append(entry)

    def note_arguments(self, parser: Any, namespace: Any) -> None:
        """Remember what argparse made of the command line, with the option that sets each value."""
        options = {action.dest: action.option_strings[-1] for action in parser._actions if action.option_strings}
        self.note("argparse", None, vars(namespace), options)

    def note_config_modules(self) -> None:
        """Remember plain values of the user's own modules that are called config or settings (once)."""
        if self._looked_at_modules:
            return
        self._looked_at_modules = True
        here = str(Path.cwd())
        for name, module in sys.modules.copy().items():  # in one go: others import
            if not _CONFIG.search(name.rpartition(".")[2]) or name.startswith("flatout."):
                continue
            path = getattr(module, "__file__", None)
            if not path or path.startswith(_PYTHONS_OWN):
                continue
            if not (path.startswith(here) or os.path.dirname(path) in sys.path):  # noqa: PTH120
                continue
            plain = (bool, int, float, str, list, tuple, dict, type(None))
            values = {k: v for k, v in vars(module).items() if not k.startswith("_") and isinstance(v, plain)}
            self.note("python", path, values)


settings = Settings()
ledger = Ledger()
_knobs: Knobs | None = None
_started = False


def start() -> None:
    """Wait for torch (once a process). `FLATOUT=off` and processes not launched by flatout are left alone."""
    global _started
    try:
        options = Options.from_environment(os.environ)
        if not _started and options is not None:
            _started = True
            signals.write_down(os.environ)
            _redirect()
            if options.plan is not None:
                _turn_knobs(options.plan)
            watch_settings()
            when_imported("torch", lambda torch: _torch_is_here(torch, options))
    except Exception as problem:
        not_measured(problem)


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
    watch_settings()
    when_imported("torch", lambda torch: redirect.redirect_torch(torch, sandbox))
    when_imported("safetensors.torch", lambda module: redirect.redirect_safetensors(module, sandbox))


def _turn_knobs(plan: Plan) -> None:
    """Have values changed as they are read."""
    global ledger, _knobs
    ledger = Ledger(plan.changes)
    if any(change.knob for change in plan.changes):
        from flatout.inside.changes.knobs import Knobs

        _knobs = Knobs(ledger)


def watch_settings() -> None:
    """Record the settings that the script reads."""
    if imports.watch_imports():
        when_imported("argparse", _record_arguments)
        when_imported("yaml", _record_loads)
        when_imported("json", _record_loads)


def _torch_is_here(torch: Any, options: Options) -> None:
    require_torch(torch)
    if options.trial is not None:
        from flatout.inside import compiler

        compiler.load_when_used(torch)
    from flatout.inside.recording import process

    process.begin(options, settings, ledger)


def require_torch(torch: Any) -> None:
    """Refuse a torch whose insides we do not know."""
    major, minor = (int(n) for n in re.findall(r"\d+", torch.__version__)[:2])
    if (major, minor) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise UsageError(f"torch {torch.__version__} is older than {oldest}, the oldest that flatout knows")


def _record_arguments(argparse: Any) -> None:
    parse = argparse.ArgumentParser.parse_known_args

    def parse_known_args(parser: Any, *args: Any, **kwargs: Any) -> Any:
        result = parse(parser, *args, **kwargs)
        if _knobs is not None:
            _quietly(_knobs.arguments, parser, result[0])
        _quietly(settings.note_arguments, parser, result[0])
        return result

    argparse.ArgumentParser.parse_known_args = parse_known_args


def _record_loads(module: Any) -> None:
    load, source = module.load, module.__name__

    def load_and_note(*args: Any, **kwargs: Any) -> Any:
        result = load(*args, **kwargs)
        # PyYAML calls it `stream`, json calls it `fp`.
        stream = args[0] if args else kwargs.get("stream", kwargs.get("fp"))
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


def _cut(value: Any, longest: int = _LONGEST_TEXT) -> Any:
    """A value, cut to what a report can hold."""
    if isinstance(value, dict):
        return {key: _cut(held, longest) for key, held in list(value.items())[:_MOST_SETTINGS]}
    if isinstance(value, list | tuple):
        return [_cut(held, longest) for held in value[:_MOST_ITEMS]]
    return str(value)[:longest] if isinstance(value, str | Path | Enum) else value
