"""What expressions of a Program are worth, as far as that can be told without running it.

Followed are literals, arithmetic, names that all places set alike, parameters whose callers agree, dicts handed on
with **. Settings (argparse, config files, classes of constants) are looked up by their names,
not followed through the objects that carry them. A GPU is taken to be there. Everything else is unknown.
"""

from __future__ import annotations

import ast
import functools
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from flatout.check import tree
from flatout.check.settings import Settings
from flatout.check.source import Binding, Program
from flatout.check.values import UNKNOWN, Table, Value, merged

_OPERATORS: dict[type[ast.operator | ast.cmpop | ast.unaryop], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Eq: operator.eq, ast.NotEq: operator.ne,
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Is: operator.is_,
    ast.IsNot: operator.is_not, ast.Not: operator.not_, ast.USub: operator.neg,
    ast.In: lambda a, b: a in _plain(b), ast.NotIn: lambda a, b: a not in _plain(b),
}  # fmt: skip
_PLAIN_CALLS: dict[str, Callable[..., Any]] = {"int": int, "float": float, "bool": bool, "min": min, "max": max}
# How people call what carries their settings.
_CARRIER = re.compile(
    r"_*(args?|arguments|opts?|options|cfg|conf(ig)?s?|settings|flags|hparams|hps?|params)\d?", re.IGNORECASE
)
# A condition that holds on one rank holds there every time.
_ON_ONE_RANK = re.compile(r"rank|main_process|is_main|is_master|master_process|is_primary", re.IGNORECASE)
_TOO_DEEP = 60
_MOST_BITS, _MOST_LETTERS = 1000, 10_000


class Evaluator:
    """Answers `value(expression)`. `answers` has os.cpu_count() and the like, by name."""

    def __init__(self, program: Program, settings: Settings, answers: dict[str, Any]) -> None:
        self.program, self.settings, self.answers = program, settings, answers
        self._memory: dict[ast.expr, Value] = {}
        self._depth = 0

    def value(self, node: ast.expr | None) -> Value:
        """What an expression is worth, and where that was said."""
        if node is None or self._depth > _TOO_DEEP:
            return Value()
        if node not in self._memory:
            self._memory[node] = Value()  # for whoever asks on the way: what is made of itself is not known
            self._depth += 1
            found = self._evaluated(node)
            self._depth -= 1
            self._memory[node] = (
                Value(found.what, found.where or tree.where(node), found.knob) if found.known else Value()
            )
        return self._memory[node]

    def _evaluated(self, node: ast.expr) -> Value:
        match node:
            case ast.Constant(value=what):
                return Value(what)
            case ast.Name():
                return self._name(node)
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                return Value(tuple(self.value(part) for part in parts))
            case ast.Dict(keys=keys, values=values):
                names = (self.value(key).what or UNKNOWN if key is not None else None for key in keys)
                return self._table(zip(names, values, strict=True))
            case ast.IfExp(test=test, body=body, orelse=orelse):
                told = self.value(test)
                taken = (body if told.what else orelse,) if told.known else (body, orelse)
                return merged(self.value(one) for one in taken)
            case ast.BoolOp(op=op, values=parts):
                return _boolean([self.value(part) for part in parts], isinstance(op, ast.And))
            case ast.UnaryOp(op=op, operand=operand):
                return _computed(_OPERATORS.get(type(op)), self.value(operand))
            case ast.BinOp(left=left, op=op, right=right):
                return _computed(_OPERATORS.get(type(op)), self.value(left), self.value(right))
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                # A step counted modulo 1 is 0 every time, whatever the step.
                every = (
                    isinstance(left, ast.BinOp) and isinstance(left.op, ast.Mod) and self.value(left.right).what == 1
                )
                return _computed(_OPERATORS.get(type(op)), Value(0) if every else self.value(left), self.value(right))
            case ast.Attribute() | ast.Subscript():
                return self._looked_up(node)
            case ast.Call():
                return self._call(node)
        return Value()

    def _table(self, items: Iterable[tuple[Any, ast.expr]]) -> Value:
        """A dict of these keys; None is for ** of another."""
        table = Table()
        for key, node in items:
            if key is None:
                table = table.plus(self.value(node))
            elif isinstance(key, str):
                table.entries[key] = self.value(node)
            else:
                table = Table(table.entries, False)
        return Value(table)

    # ------------------------------------------------------------------ names

    def _name(self, node: ast.Name) -> Value:
        if self.settings.config is not None and any(
            tree.dotted(call.func) == "exec" for call in tree.module_of(node).calls
        ):
            over = self.settings.of((node.id,))  # a config that is run in the script's own namespace
            if over is not None:
                return over
        found = self._agreed(node)
        return Value(self._with_items(node, found.what)) if isinstance(found.what, Table) else found

    def _agreed(self, node: ast.Name | ast.Attribute) -> Value:
        return merged(self.value(origin) for origin in self.origins(node))

    def origins(self, node: ast.Name | ast.Attribute) -> Iterator[ast.expr | None]:
        """What a name (or self.name) may stand for; None for what cannot be told."""
        owner = tree.class_of(node)
        if isinstance(node, ast.Name):
            places = [(scope, node.id) for scope in tree.scopes(node)]
        else:
            places = [(owner, f"self.{node.attr}"), (owner, node.attr)] if owner is not None else []
        for scope, name in places:
            bindings = self._bindings(scope, name)
            for binding in bindings:
                if self.runs(binding.target) is not False:
                    yield binding.node
            is_parameter = isinstance(scope, ast.FunctionDef) and name in tree.parameters(scope)
            if isinstance(scope, ast.FunctionDef) and is_parameter:
                yield from self._given(scope, name)
            if bindings or is_parameter:
                return
        if isinstance(node, ast.Name):
            yield from self._imported(node)

    def _bindings(self, scope: tree.Scope, name: str) -> list[Binding]:
        return tree.module_of(scope).bindings.get((scope, name), [])

    def _given(self, function: ast.FunctionDef, name: str) -> Iterator[ast.expr | None]:
        """What the callers of a function give for a parameter."""
        owner, known = tree.class_of(function), tree.parameters(function)
        called = owner.name if owner is not None and function.name == "__init__" else function.name
        position = list(known).index(name) - (1 if next(iter(known)) in ("self", "cls") else 0)
        for call, _ in self.program.calls(called) if position >= 0 else ():  # nobody is given self
            given = tree.argument(call, name, position)
            uncertain = tree.spread(call) or tree.starred(call)
            yield given if given is not None else None if uncertain else known[name]

    def _imported(self, node: ast.Name) -> Iterator[ast.expr | None]:
        module = tree.module_of(node)
        full = module.imports.get(node.id)
        for source in [full] if full else module.starred:
            other = self.program.by_name.get(source)
            if other is not None:
                yield from (one.node for one in self._bindings(other.root, tree.last_name(full) if full else node.id))

    def _with_items(self, node: ast.Name, table: Table) -> Table:
        """A dict with what d["key"] = value and d.update(other) put in, wherever they stand in the function."""
        module, table = tree.module_of(node), Table(dict(table.entries), table.complete)
        for target, given in module.assigns:
            if isinstance(target, ast.Subscript) and _is_name(target.value, node.id):
                key = self.value(target.slice).what
                if not isinstance(key, str):
                    table = Table(table.entries, False)
                elif self.runs(target) is not False:
                    before, now = table.entries.get(key), self.value(given)
                    table.entries[key] = now if before is None else merged([before, now])
        for call in module.calls:
            updates = tree.dotted(call.func) == f"{node.id}.update" and call.args
            if updates and tree.function_of(call) is tree.function_of(node) and self.runs(call) is not False:
                table = table.plus(self.value(call.args[0]))
        return table

    # ------------------------------------------------------------------ settings, attributes, items

    def _looked_up(self, node: ast.expr, default: Value | None = None) -> Value:
        """A name of a holder: config.key, config["key"], config.get("key", default), getattr(args, "key", default)."""
        if isinstance(node, ast.Attribute) and _is_name(node.value, "self"):
            return self._agreed(node)
        found = _lookup(node)
        if found is None:
            return Value()
        holder, name = found
        table, before = self.value(holder).what, _path(holder)
        if isinstance(table, Table):
            return table.entries.get(name) or (default if default and table.complete else Value())
        other = self.program.by_name.get(tree.dotted(holder)) if isinstance(node, ast.Attribute) else None
        if other is not None and (bindings := self._bindings(other.root, name)):
            return merged(self.value(binding.node) for binding in bindings)
        if before and name == "type" and "device" in before[-1].lower():
            return Value("cuda")
        carried = [at for at, one in enumerate(before) if self.carries_settings(one)]
        if not carried:
            return Value()
        setting = self.settings.of((*before[carried[-1] + 1 :], name))
        if setting is None and default is not None and self.settings.config is not None:
            return default
        return setting or Value()

    def carries_settings(self, name: str) -> bool:
        """Whether what is called so has settings for its attributes."""
        found = self.program.find_class(name)
        named_so = bool(_CARRIER.fullmatch(name)) or (found is not None and is_settings_class(found))
        return named_so or name in self._parsed

    @functools.cached_property
    def _parsed(self) -> set[str]:
        """What the command line's settings are called, by whatever name: a = parser.parse_args()."""
        parse, names = {"parse_args", "parse_known_args"}, set()
        for call, _ in self.program.calls(*parse):
            function = tree.function_of(call) if isinstance(tree.parent(call), ast.Return) else None
            parse |= {function.name} if function is not None else set()
        for call, _ in self.program.calls(*parse):
            match tree.parent(call):
                case ast.Assign(targets=[ast.Name(id=name) | ast.Tuple(elts=[ast.Name(id=name), *_])]):
                    names.add(name)
        return names

    def _call(self, node: ast.Call) -> Value:
        name = tree.dotted(node.func)
        if name in self.answers:
            return Value(self.answers[name])
        if name in _PLAIN_CALLS and not node.keywords:
            given = [self.value(one) for one in node.args]
            spread_out = given[0].what if len(given) == 1 and isinstance(given[0].what, tuple) else given
            return _computed(_PLAIN_CALLS[name], *spread_out)
        if name == "dict":
            return self._table([*((None, one) for one in node.args), *((k.arg, k.value) for k in node.keywords)])
        if _lookup(node):
            has_default = len(node.args) == (3 if name == "getattr" else 2)
            return self._looked_up(node, self.value(node.args[-1]) if has_default else Value(None))
        return Value()

    # ------------------------------------------------------------------ conditions

    def runs(self, node: ast.AST, within: ast.AST | None = None) -> bool | None:
        """Whether a node runs each time `within` (or its function) does; None where a condition cannot be told."""
        below, certain = node, True
        for above in tree.around(node):
            if isinstance(above, ast.For | ast.While) and _skipped(above.body, below):
                certain = False
            if above is within or (within is None and isinstance(above, ast.FunctionDef)):
                return certain or None
            if isinstance(above, ast.If | ast.IfExp) and below is not above.test:
                then = below is above.body if isinstance(above, ast.IfExp) else below in above.body
                test = self.value(above.test)
                if test.known and bool(test.what) is not then:
                    return False
                certain &= test.known or (then and _on_one_rank(ast.unparse(above.test)))
            elif isinstance(above, ast.BoolOp):
                certain &= below is above.values[0]
            elif isinstance(above, ast.FunctionDef | ast.Lambda | ast.ExceptHandler | ast.ClassDef):
                certain = False
            below = above
        return (certain or None) if within is None else None


def _boolean(parts: list[Value], is_and: bool) -> Value:
    """The first part that decides; where none does, the first, which is what a person would set."""
    for part in parts:
        if not part.known:
            certain = is_and and any(other.known and not other.what for other in parts)
            return Value(False) if certain else Value()
        if bool(part.what) is not is_and:
            return part
    return parts[0] if all(part.what is True for part in parts) else parts[-1]


def is_settings_class(node: ast.ClassDef) -> bool:
    """Whether a class is called like a holder of settings: CFG, TrainConfig, TrainingArguments."""
    return bool(re.search(r"(cfg|config|conf|settings|arguments|args|options|hparams|hyperparam\w*)$", node.name, re.I))


def _is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _lookup(node: ast.expr | None) -> tuple[ast.expr, str] | None:
    """What a name is looked up in, and the name: cfg.amp, cfg["amp"], cfg.get("amp"), getattr(cfg, "amp")."""
    match node:
        case (
            ast.Attribute(value=holder, attr=name)
            | ast.Subscript(value=holder, slice=ast.Constant(value=str(name)))
            | ast.Call(func=ast.Attribute(value=holder, attr="get"), args=[ast.Constant(value=str(name)), *_])
            | ast.Call(func=ast.Name(id="getattr"), args=[holder, ast.Constant(value=str(name)), *_])
        ):
            return holder, name
    return None


def _path(node: ast.expr) -> list[str]:
    """The names that lead to a setting: cfg.train["amp"] → cfg, train, amp. Empty where it is something else."""
    if isinstance(node, ast.Name):
        return [node.id]
    found = _lookup(node)
    before = _path(found[0]) if found is not None else []
    return [*before, found[1]] if found is not None and before else []


def _plain(what: Any) -> Any:
    return [value.what for value in what] if isinstance(what, tuple) else what


def _computed(function: Callable[..., Any] | None, *values: Value) -> Value:
    """A function of known values."""
    if function is None or not all(value.known for value in values):
        return Value()
    if function in (operator.mul, operator.mod) and any(isinstance(value.what, str | tuple) for value in values):
        return Value()  # "x" * 10**9 is no setting
    try:
        found = function(*(value.what for value in values))
    except Exception:  # whatever the user's arithmetic may raise: it is not ours to run into
        return Value()
    return Value(found) if _is_small(found) else Value()


def _is_small(what: Any) -> bool:
    """Whether it is no larger than a setting: what is doubled line by line would not end."""
    if isinstance(what, int):
        return what.bit_length() < _MOST_BITS
    return not isinstance(what, str | tuple) or len(what) < _MOST_LETTERS


def _on_one_rank(test: str) -> bool:
    return bool(_ON_ONE_RANK.search(test)) and "%" not in test and " and " not in test


def _skipped(body: list[ast.stmt], statement: ast.AST) -> bool:
    """Whether an `if step % 10: continue` stands above a statement of a loop."""
    for earlier in body:
        if earlier is statement:
            break
        skips = isinstance(earlier, ast.If) and "%" in ast.unparse(earlier.test)
        if skips and any(isinstance(node, ast.Continue) for node in ast.walk(earlier)):
            return True
    return False
