"""Runs in every Python process of a launched command, before the user's code. Standard library only until
torch is in.

It waits for a few imports; nothing else happens in a process that never trains.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flatout.inside import imports
from flatout.inside.changes.ledger import Ledger
from flatout.inside.imports import not_measured, when_imported
from flatout.inside.settings import Settings
from flatout.launch import signals
from flatout.launch.protocol import Options
from flatout.model.errors import UsageError

if TYPE_CHECKING:
    from flatout.inside.changes.knobs import Knobs
    from flatout.model.plan import Plan

OLDEST_TORCH = (2, 6)

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
        when_imported("yaml", _record_yaml)
        when_imported("json", _record_json)


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


def _record_yaml(yaml: Any) -> None:
    _record_loads("yaml", yaml)


def _record_json(json: Any) -> None:
    _record_loads("json", json)


def _record_loads(source: str, module: Any) -> None:
    load = module.load

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
