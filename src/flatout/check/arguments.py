"""The settings of a script: what argparse declares, classes of constants, a config file, the flags given."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flatout.check import tree
from flatout.check.evaluate import Evaluator, is_settings_class
from flatout.check.settings import Command, Leaves, Settings, as_data, folded, read_data
from flatout.check.source import Program, read_program
from flatout.check.values import UNKNOWN, Table, Value, merged
from flatout.model.errors import UsageError
from flatout.model.inputs import is_file

_WANTS_A_GPU = ("cuda", "usecuda", "gpu", "usegpu", "accel", "useaccel")
_CONFIGS = (".yaml", ".yml", ".json", ".py")


def read_settings(program: Program, command: Command | None, config: Path | None, answers: dict[str, Any]) -> Settings:
    """Every setting that can be known before the script runs."""
    command = command or Command(script=Path())  # which gives no flags
    settings = Settings()
    evaluator = Evaluator(program, settings, answers)
    settings.changed = {folded(name) for name in _changed(evaluator)}
    declared = list(_declared(evaluator, command))
    path = config or _config_by_default(evaluator, command)
    try:
        settings.config, read = path, read_config(path, answers) if path is not None else []
    except UsageError:
        if config is not None:
            raise
        settings.config, read = None, []  # nobody named it: what it holds stays unknown
    if _defaults_come_from_elsewhere(evaluator):
        over = {folded(leaf[-1]) for leaf, _ in read}
        declared = [(leaf, value) for leaf, value in declared if folded(leaf[-1]) not in over]
    settings.leaves = [*declared, *_of_classes(evaluator), *read]
    settings.given(command)
    return settings


def read_config(path: Path, answers: dict[str, Any]) -> Leaves:
    """A config file: YAML, JSON, or a Python module of constants."""
    if path.suffix != ".py":
        return read_data(path)
    program = read_program(path)
    return _constants(Evaluator(program, Settings(), answers), program.modules[0].root)


def _constants(evaluator: Evaluator, scope: ast.Module | ast.ClassDef) -> Leaves:
    found: Leaves = []
    for (bound_in, name), bindings in tree.module_of(scope).bindings.items():
        if bound_in is scope and isinstance(bindings[0].target, ast.Name):
            value = merged(evaluator.value(bound.node) for bound in bindings)
            found += _leaves((name,), Value(value.what, value.where, f"{name} =") if value.known else value)
    return found


def _leaves(path: tuple[str, ...], value: Value) -> Iterator[tuple[tuple[str, ...], Value]]:
    if isinstance(value.what, Table):
        for name, entry in value.what.entries.items():
            yield from _leaves((*path, name), entry)
    else:
        yield path, value


def _changed(evaluator: Evaluator) -> Iterator[str]:
    """Settings that the script sets itself: args.workers = …, cfg["workers"] = …"""
    for target, _ in (binding for module in evaluator.program.modules for binding in module.assigns):
        match target:
            case (
                ast.Attribute(value=ast.Name(id=holder) | ast.Attribute(attr=holder), attr=name)
                | ast.Subscript(value=ast.Name(id=holder), slice=ast.Constant(value=str(name)))
            ) if evaluator.carries_settings(holder):
                yield name


def _of_classes(evaluator: Evaluator) -> Leaves:
    """Constants of classes such as CFG; what one is built with stands above them."""
    found: Leaves = []
    for owner in (owner for module in evaluator.program.modules for owner in module.classes.values()):
        for leaf, value in _constants(evaluator, owner) if is_settings_class(owner) else ():
            built = [call for call, _ in evaluator.program.calls(owner.name)]
            given = [evaluator.value(node) for call in built if (node := tree.argument(call, leaf[-1]))]
            unclear = any(call.args or tree.spread(call) for call in built)
            found.append((leaf, Value() if unclear or value.what is None else merged(given or [value])))
    return found


def _declared(evaluator: Evaluator, command: Command) -> Leaves:
    """Every argument of argparse with its default, or with what the command gives it."""
    found: Leaves = []
    for call, _ in evaluator.program.calls("add_argument"):
        flags = [flag for one in call.args if isinstance(flag := evaluator.value(one).what, str)]
        if flags:
            found.append(_argument(evaluator, call, flags, command))
    return found


def _argument(
    evaluator: Evaluator, call: ast.Call, flags: list[str], command: Command
) -> tuple[tuple[str, ...], Value]:
    long = next((flag for flag in flags if flag.startswith("--")), flags[0])
    given = {k.arg: evaluator.value(k.value) for k in call.keywords if k.arg is not None}
    name = given.get("dest", Value()).what
    leaf = (name if isinstance(name, str) else long.lstrip("-").replace("-", "_"),)
    action, kind = given.get("action", Value()).what, tree.argument(call, "type")
    switch, said = action in ("store_true", "store_false"), tree.where(call)
    text = command.flag(*flags)
    if text is not None:
        what = action == "store_true" if switch else _converted(kind, text)
        return leaf, Value(what, command.where or said, long)
    if action == "store_true" and folded(leaf[0]) in _WANTS_A_GPU:
        return leaf, Value(True)
    if given.get("required", Value()).what is True or not long.startswith("-") or tree.spread(call):
        return leaf, Value()
    default = given["default"].what if "default" in given else (action == "store_false" if switch else None)
    if folded(leaf[0]) == "device" and default == "cpu":
        return leaf, Value()  # it is there to be overridden
    return leaf, Value(_converted(kind, default) if isinstance(default, str) else default, said, long)


def _converted(kind: ast.expr | None, text: str | bool) -> Any:
    """A text as add_argument's `type` makes a value of it."""
    name = tree.dotted(kind) if kind is not None else "str"
    if isinstance(text, bool) or name not in ("int", "float", "str"):
        return text if isinstance(text, bool) else UNKNOWN
    return as_data(text, is_text=name == "str")


def _config_by_default(evaluator: Evaluator, command: Command) -> Path | None:
    """The config file the script reads when it is told nothing else: the file its own --config has for a default."""
    for call, _ in evaluator.program.calls("add_argument"):
        names = [one.value for one in call.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        if not any(word in name.lower() for name in names for word in ("config", "cfg")):
            continue
        text, default = command.flag(*names), tree.argument(call, "default")
        parts = [node for node in ast.walk(default) if isinstance(node, ast.Constant)] if default is not None else []
        words = [str(node.value) for node in sorted(parts, key=lambda node: (node.lineno, node.col_offset))]
        path = Path(text) if isinstance(text, str) else Path(*words)
        for base in (Path(), tree.module_of(call).path.parent):
            if path.suffix in _CONFIGS and is_file(base / path):
                return base / path
    return None


def _defaults_come_from_elsewhere(evaluator: Evaluator) -> bool:
    """Whether the config has the last word: set_defaults(**config), setattr(args, …), args.__dict__.update(config)."""
    return any(
        name == "setattr" or name.endswith("__dict__.update") or (name.endswith("set_defaults") and tree.spread(call))
        for call, name in evaluator.program.calls("set_defaults", "setattr", "update")
    )
