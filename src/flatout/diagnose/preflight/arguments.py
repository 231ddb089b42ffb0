"""What a script's own arguments are: what argparse declares, the flags given, a config that overrules defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import libcst as cst

from flatout.diagnose.preflight.evaluate import Evaluator
from flatout.diagnose.preflight.settings import Config
from flatout.diagnose.preflight.source import Module, arguments
from flatout.diagnose.preflight.values import UNKNOWN, Table, Value, folded, merged

_WANTS_A_GPU = ("cuda", "usecuda", "gpu", "usegpu", "accel", "useaccel")
_CONFIGS = (".yaml", ".yml", ".json", ".py")


def declared(evaluator: Evaluator) -> Table:
    """Every argument with its default, or with what the command gives it."""
    table = Table(complete=False)
    for module, call, _ in evaluator.program.calls("add_argument"):
        flags = [evaluator.value(module, flag).what for flag in arguments(call).positional]
        if flags and all(isinstance(flag, str) for flag in flags):
            name, found = _argument(evaluator, module, call, flags)
            table.entries[name] = merged([table.entries[name], found]) if name in table.entries else found
    return table


def config_by_default(evaluator: Evaluator, table: Table) -> Path | None:
    """The config file the script reads when it is told nothing else."""
    for name, value in table.entries.items():
        if not isinstance(value.what, str | Path) or not any(word in name.lower() for word in ("config", "cfg")):
            continue
        path = Path(value.what)
        for base in (Path(), evaluator.program.script.path.parent):
            if path.suffix in _CONFIGS and (base / path).is_file():
                return base / path
    return None


def with_config(evaluator: Evaluator, table: Table, config: Config) -> Table:
    """The arguments, with the config's values where the script takes its defaults from there."""
    if not _defaults_come_from_elsewhere(evaluator):
        return table
    found = Table(dict(table.entries), complete=False)
    known = {folded(name): name for name in table.entries}
    for name, value in config.table.entries.items():
        dest = known.get(folded(name), name)
        flag = f"--{dest.replace('_', '-')}".lower()
        given = evaluator.command.flag(f"--{dest}", flag)
        found.entries[dest] = value if given is None else _given(evaluator, given, flag, value)
    return found


def _defaults_come_from_elsewhere(evaluator: Evaluator) -> bool:
    """set_defaults(**config), setattr(args, key, value), or add_argument with names that a loop makes."""
    for _, call, name in evaluator.program.calls("set_defaults", "setattr", "update"):
        if (
            name == "setattr"
            or name.endswith("__dict__.update")
            or (name.endswith("set_defaults") and arguments(call).rest)
        ):
            return True
    declarations = [(m, arguments(call).positional) for m, call, _ in evaluator.program.calls("add_argument")]
    return any(not isinstance(evaluator.value(m, flags[0]).what, str) for m, flags in declarations if flags)


def _given(evaluator: Evaluator, text: str | bool, flag: str, default: Value) -> Value:
    """A flag of the command line, of the kind its default is."""
    what = text if isinstance(text, bool) or isinstance(default.what, str) else _as_data(text)
    return Value(what, evaluator.command.where, flag)


def _argument(evaluator: Evaluator, module: Module, call: cst.Call, flags: list[str]) -> tuple[str, Value]:
    """The name of one declared argument, and what it is."""
    given = arguments(call)
    long = next((flag for flag in flags if flag.startswith("--")), flags[0])
    dest = evaluator.value(module, given.keywords.get("dest")).what
    name = dest if isinstance(dest, str) else long.lstrip("-").replace("-", "_")
    knob, where = (long if long.startswith("-") else None), module.where(call)
    action = evaluator.value(module, given.keywords.get("action")).what
    switch, kind = action in ("store_true", "store_false"), given.keywords.get("type")
    text = evaluator.command.flag(*flags)
    if text is not None:
        what = action == "store_true" if switch else _converted(module, kind, text)
        return name, Value(what, evaluator.command.where or where, knob)
    if action == "store_true" and folded(name) in _WANTS_A_GPU:
        return name, Value(True)
    if evaluator.value(module, given.keywords.get("required")).what is True or knob is None:
        return name, Value()
    if "default" not in given.keywords:
        return name, Value(action == "store_false" if switch else None, where, knob)
    default = evaluator.value(module, given.keywords["default"]).what
    if folded(name) == "device" and default == "cpu":
        return name, Value()  # it is there to be overridden
    return name, Value(_converted(module, kind, default) if isinstance(default, str) else default, where, knob)


def _converted(module: Module, kind: cst.BaseExpression | None, text: str | bool) -> Any:
    """A text as add_argument's `type` makes a value of it."""
    if isinstance(text, bool) or kind is None:
        return text if "$" not in str(text) else UNKNOWN
    name = module.dotted(kind) or ""
    try:
        if name in ("int", "float", "str"):
            return {"int": int, "float": float, "str": str}[name](text)
    except ValueError:
        return UNKNOWN
    return Path(text) if name in ("Path", "pathlib.Path") else UNKNOWN


def _as_data(text: str) -> Any:
    import yaml

    if "$" in text:
        return UNKNOWN
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text
