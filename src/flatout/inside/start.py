"""Runs in every Python process of a launched command, before the user's code, and waits for a few imports.
Standard library only until torch is in.

    import torch ──────────────► recording.process.begin
    import argparse, yaml, json ─► Settings: what the script reads, as a plan has changed it
    flatout.attach() ──────────► the same by hand, in a notebook or a script
    flatout.apply() ───────────► a plan's changes by hand, without a recording
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.inside.changes.ledger import Ledger
from flatout.launch.protocol import Options, let_be_read, new_folder, note_not_measured, write_down_signals
from flatout.model.errors import FlatoutError, UsageError
from flatout.model.records import SettingsRead
from flatout.redact import redact_setting, redact_text

if TYPE_CHECKING:
    from flatout.inside.changes.knob_values import Knobs
    from flatout.inside.recording import Recording

OLDEST_TORCH = (2, 6)

_CONFIG = re.compile(r"config|settings|options", re.I)
_PYTHONS_OWN = os.path.dirname(os.__file__)  # noqa: PTH120  # sysconfig, for one
_MOST_SETTINGS = 400
_MOST_ITEMS = 50
_MOST_SOURCES = 20
_LONGEST_TEXT = 300


# -- actions that follow the import of a module


class _AfterImport:
    """A finder for the head of `sys.meta_path`: calls actions after the import of certain modules."""

    def __init__(self) -> None:
        self._actions: dict[str, list[Callable[[ModuleType], None]]] = {}
        self._finding = False

    def when(self, name: str, action: Callable[[ModuleType], None]) -> None:
        """Call `action` once `name` has been imported, now if it has been already."""
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
        """Act once this loader has executed its module: some only ask whether there is a torch."""
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
        _not_measured(problem)


def _not_measured(problem: Exception) -> None:
    """Say why this process is not recorded; once for all processes with the same reason."""
    reason = str(problem)
    if not isinstance(problem, FlatoutError):
        reason = f"{type(problem).__name__}: {problem}"
    reason = redact_text(reason)
    options = Options.from_environment(os.environ)
    if options is None or note_not_measured(options.folder, reason):
        print(f"flatout: not measuring this process ({reason})", file=sys.stderr)


_imports = _AfterImport()
when_imported = _imports.when


# -- the script's settings


class Settings:
    """Values the script read from its command line, from YAML and JSON files and from Python config
    modules."""

    def __init__(self) -> None:
        self.read: list[SettingsRead] = []
        self._looked_at_modules = False

    def loaded(self, source: str, file: Any, values: Any, options: dict[str, str] | None = None) -> None:
        """Values have been read, from a `file` if it has a name; those of installed packages do not count."""
        file = None if file is None else str(file)
        if file is not None and "-packages" in file:
            return
        if not isinstance(values, dict) or not values or len(self.read) >= _MOST_SOURCES:
            return  # a dataset may read a file a sample
        # A secret that is cut short would no longer look like one: hide it first.
        known = redact_setting("", _cut(values, 10 * _LONGEST_TEXT))
        entry = SettingsRead(source=source, file=file, values=_cut(known), options=options or {})
        if entry not in self.read:
            self.read.append(entry)

    def arguments(self, parser: Any, namespace: Any) -> None:
        """The command line has been parsed: remember the values, with the option that sets each."""
        options = {action.dest: action.option_strings[-1] for action in parser._actions if action.option_strings}
        self.loaded("argparse", None, vars(namespace), options)

    def note_config_modules(self) -> None:
        """Remember, once, plain values of the user's modules that are called config or settings."""
        if self._looked_at_modules:
            return
        self._looked_at_modules = True
        here = str(Path.cwd())
        for name, module in sys.modules.copy().items():  # in one go: others import
            path = getattr(module, "__file__", None) or ""
            if not _CONFIG.search(name.rpartition(".")[2]) or name.startswith("flatout."):
                continue
            of_user = path.startswith(here) or os.path.dirname(path) in sys.path  # noqa: PTH120
            if of_user and path and not path.startswith(_PYTHONS_OWN):
                plain = (bool, int, float, str, list, tuple, dict, type(None))
                values = {k: v for k, v in vars(module).items() if not k.startswith("_") and isinstance(v, plain)}
                self.loaded("python", path, values)


def _cut(value: Any, longest: int = _LONGEST_TEXT) -> Any:
    """A value, cut to what a report can hold."""
    if isinstance(value, dict):
        return {key: _cut(held, longest) for key, held in list(value.items())[:_MOST_SETTINGS]}
    if isinstance(value, list | tuple):
        return [_cut(held, longest) for held in value[:_MOST_ITEMS]]
    return str(value)[:longest] if isinstance(value, str | Path | Enum) else value


def watch_settings() -> None:
    """Record the settings that the script reads, from now on."""
    if _imports not in sys.meta_path:
        sys.meta_path.insert(0, _imports)
        when_imported("argparse", _record_arguments)
        when_imported("yaml", _record_loads)
        when_imported("json", _record_loads)


def _record_arguments(argparse: Any) -> None:
    parse = argparse.ArgumentParser.parse_known_args

    def parse_known_args(parser: Any, *args: Any, **kwargs: Any) -> Any:
        result = parse(parser, *args, **kwargs)
        for reader in _readers:
            with suppress(Exception):
                reader.arguments(parser, result[0])
        return result

    argparse.ArgumentParser.parse_known_args = parse_known_args


def _record_loads(module: Any) -> None:
    load, source = module.load, module.__name__

    def load_and_note(*args: Any, **kwargs: Any) -> Any:
        result = load(*args, **kwargs)
        # PyYAML calls it `stream`, json calls it `fp`.
        stream = args[0] if args else kwargs.get("stream", kwargs.get("fp"))
        for reader in _readers:
            with suppress(Exception):
                reader.loaded(source, getattr(stream, "name", None), result)
        return result

    module.load = load_and_note


# -- the beginning of a recording

settings = Settings()
_readers: list[Knobs | Settings] = [settings]  # of settings; what a plan changes is done first
_started = False
_ledger = Ledger()  # the changes to make in this process


def start() -> None:
    """Wait for torch, once a process; nothing happens where flatout did not launch it."""
    global _started, _ledger
    try:
        options = Options.from_environment(os.environ)
        if _started or options is None:
            return
        _started = True
        write_down_signals(os.environ)
        if options.read_by is not None:
            let_be_read(options.read_by)
        _redirect()
        changes = options.plan.changes if options.plan is not None else ()
        _ledger = Ledger(changes)
        _turn_knobs()
        watch_settings()
        when_imported("torch", lambda torch: _torch_is_here(torch, options))
    except Exception as problem:
        _not_measured(problem)


def _turn_knobs() -> None:
    if any(change.knob for change in _ledger.changes.values()):
        from flatout.inside.changes.knob_values import Knobs

        _readers[:] = [Knobs(_ledger), settings]


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
    when_imported("torch", lambda torch: redirect.redirect_torch(torch, sandbox))
    when_imported("safetensors.torch", lambda module: redirect.redirect_safetensors(module, sandbox))


def _torch_is_here(torch: Any, options: Options) -> None:
    _require_torch(torch)
    if options.trial is not None:
        from flatout.inside import compiler

        compiler.load_when_used()
    _begin(options)


def _require_torch(torch: Any) -> None:
    """Refuse a torch whose insides we do not know."""
    major, minor = (int(n) for n in re.findall(r"\d+", torch.__version__)[:2])
    if (major, minor) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise UsageError(f"torch {torch.__version__} is older than {oldest}, the oldest that flatout knows")


def _begin(options: Options, *, late: bool = False) -> Recording:
    from flatout.inside.recording import process

    process.patches.when_imported = when_imported
    if late:
        process.roots.note_living()
    return process.begin(options, settings, _ledger)


# -- by hand


class Attachment:
    """A recording, which ends with the process, with `close`, or with the `with` block: then `show`
    is called."""

    def __init__(
        self, folder: Path | None, recording: Recording | None, show: Callable[[Path], None] | None = None
    ) -> None:
        self._folder = folder
        self._recording = recording
        self._show = show

    @property
    def folder(self) -> Path | None:
        """Where it is recorded: beside the folder that was asked for, if that holds a recording already."""
        return self._recording.folder if self._recording is not None else self._folder

    @property
    def ended(self) -> bool:
        """Whether the recording is over, as it is after `max_steps`."""
        return self._recording is not None and self._recording.closed

    def close(self, raised: BaseException | None = None) -> None:
        """End the recording: the trace in `folder` is whole, and says what was `raised`."""
        if self._recording is not None:
            self._recording.close(raised)

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, kind: object, raised: BaseException | None, trace: object) -> None:
        self.close(raised)
        if self._show is not None and self.folder is not None:
            self._show(self.folder)


def attach(
    trace: str | Path | None = None,
    *,
    xray: bool = True,
    max_steps: int | None = None,
    name: str = "",
    show: Callable[[Path], None] | None = None,
) -> Attachment:
    """What `flatout.attach` does; a recording of its own can have a `name`, end after `max_steps`,
    and be shown."""
    import torch

    launched = Options.from_environment(os.environ)
    if os.environ.get("FLATOUT") == "off":
        return Attachment(None, None)
    if launched is not None:
        from flatout.inside.recording import process

        return Attachment(launched.folder, process.recording)
    _require_torch(torch)
    name = name or Path(sys.argv[0]).stem or "notebook"
    folder = Path(trace or new_folder(name)).absolute()
    watch_settings()
    options = Options(folder=folder, name=name, xray=xray, max_steps=max_steps)
    return Attachment(folder, _begin(options, late=True), show)


def apply(plan: str | Path) -> None:
    """Make a plan's changes in this process; call it before the loader, the optimizer and the model
    are built.

    What `flatout run --plan` makes already is not made twice; with FLATOUT=off nothing is changed.
    """
    from flatout.model.changes import check
    from flatout.model.plan import Plan

    wanted = Plan.load(Path(plan))
    check(wanted, str(plan))
    new = {change.name: change for change in wanted.changes if change.name not in _ledger.changes}
    if not new or os.environ.get("FLATOUT") == "off":
        return
    launched = Options.from_environment(os.environ)
    _ledger.changes.update(new)
    _turn_knobs()
    watch_settings()
    if launched is None or "torch" in sys.modules:
        when_imported("torch", lambda torch: _change_at_once(torch, launched))


def _change_at_once(torch: Any, launched: Options | None) -> None:
    """Make changes in a process that is not recorded, or whose recording began when torch was imported."""
    from flatout.inside.recording import process

    _require_torch(torch)
    process.patches.when_imported = when_imported
    if process.applied is not None:
        print("flatout: flatout.apply has no effect: other changes are being made already", file=sys.stderr)
        return
    applied = process.make_changes(launched or Options(folder=Path(), name=""), _ledger)
    if launched is None and applied is not None:  # else the recording tells it
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(lambda *_: applied.step_ended(first=False))
