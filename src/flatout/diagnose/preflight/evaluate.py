"""What expressions of a Program are worth, as far as that can be told without running it.

Followed are literals, arithmetic, names that all places set alike, parameters whose callers agree, dicts handed on
with **. Settings (argparse, config files, classes of constants) are looked up by their names,
not followed through the objects that carry them. A GPU is taken to be there. Everything else is unknown.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator
from typing import Any

from flatout.diagnose.preflight.settings import Settings
from flatout.diagnose.preflight.source import Module, Program, argument, parameters, spread
from flatout.diagnose.preflight.values import Table, Value, merged

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


class Evaluator:
    """Answers `value(module, expression)`. `answers` has os.cpu_count() and the like, by name."""

    def __init__(self, program: Program, settings: Settings, answers: dict[str, Any]) -> None:
        self.program, self.settings, self.answers = program, settings, answers
        self._memory: dict[ast.expr, Value] = {}
        self._depth = 0

    def value(self, module: Module, node: ast.expr | None) -> Value:
        """What an expression is worth, and where that was said."""
        if node is None or self._depth > _TOO_DEEP:
            return Value()
        if node not in self._memory:
            self._memory[node] = Value()  # for whoever asks on the way: what is made of itself is not known
            self._depth += 1
            found = self._evaluated(module, node)
            self._depth -= 1
            where = found.where or module.where(node)
            self._memory[node] = Value(found.what, where, found.knob) if found.known else Value()
        return self._memory[node]

    def _evaluated(self, module: Module, node: ast.expr) -> Value:
        match node:
            case ast.Constant(value=what):
                return Value(what)
            case ast.Name():
                return self._name(module, node)
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                return Value(tuple(self.value(module, part) for part in parts))
            case ast.Dict(keys=keys, values=values):
                return self._dict(module, list(zip(keys, values, strict=True)))
            case ast.IfExp(test=test, body=body, orelse=orelse):
                told = self.value(module, test)
                taken = (body if told.what else orelse,) if told.known else (body, orelse)
                return merged(self.value(module, one) for one in taken)
            case ast.BoolOp(op=op, values=parts):
                return self._boolean([self.value(module, part) for part in parts], isinstance(op, ast.And))
            case ast.UnaryOp(op=op, operand=operand):
                return _computed(_OPERATORS.get(type(op)), self.value(module, operand))
            case ast.BinOp(left=left, op=op, right=right):
                return _computed(_OPERATORS.get(type(op)), self.value(module, left), self.value(module, right))
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                # A step counted modulo 1 is 0 every time, whatever the step.
                counts = isinstance(left, ast.BinOp) and isinstance(left.op, ast.Mod)
                every = counts and self.value(module, left.right).what == 1  # type: ignore[attr-defined]
                first = Value(0) if every else self.value(module, left)
                return _computed(_OPERATORS.get(type(op)), first, self.value(module, right))
            case ast.Attribute() | ast.Subscript():
                return self._looked_up(module, node)
            case ast.Call():
                return self._call(module, node)
        return Value()

    @staticmethod
    def _boolean(parts: list[Value], is_and: bool) -> Value:
        """The first part that decides; where none does, the first, which is what a person would set."""
        for part in parts:
            if not part.known:
                certain = is_and and any(other.known and not other.what for other in parts)
                return Value(False) if certain else Value()
            if bool(part.what) is not is_and:
                return part
        return parts[0] if all(part.what is True for part in parts) else parts[-1]

    def _dict(self, module: Module, items: list[tuple[ast.expr | None, ast.expr]]) -> Value:
        table = Table()
        for key, node in items:
            name = self.value(module, key).what
            if key is None:  # ** of another
                table = table.plus(self.value(module, node))
            elif isinstance(name, str):
                table.entries[name] = self.value(module, node)
            else:
                table = Table(table.entries, False)
        return Value(table)

    # ------------------------------------------------------------------ names

    def _name(self, module: Module, node: ast.Name) -> Value:
        if self.settings.config is not None and any(module.dotted(call.func) == "exec" for call in module.calls):
            over = self.settings.of((node.id,))  # a config that is run in the script's own namespace
            if over is not None:
                return over
        found = merged(self.value(m, origin) for m, origin in self.origins(module, node))
        return Value(self._with_items(module, node, found.what)) if isinstance(found.what, Table) else found

    def origins(self, module: Module, node: ast.Name | ast.Attribute) -> Iterator[tuple[Module, ast.expr | None]]:
        """What a name (or self.name) may stand for, each with its module; None for what cannot be told."""
        owner = module.class_of(node)
        if isinstance(node, ast.Name):
            places = [(scope, node.id) for scope in module.scopes(node)]
        else:
            places = [(owner, f"self.{node.attr}"), (owner, node.attr)] if owner is not None else []
        for scope, name in places:
            bindings = module.bindings(scope, name)
            is_parameter = isinstance(scope, ast.FunctionDef) and name in parameters(scope)
            for binding in bindings:
                if self.runs(module, binding.target) is not False:
                    yield module, binding.node
            if is_parameter and isinstance(scope, ast.FunctionDef):
                yield from self._given(module, scope, name)
            if bindings or is_parameter:
                return
        if isinstance(node, ast.Name):
            yield from self._imported(module, node.id)

    def _given(self, module: Module, function: ast.FunctionDef, name: str) -> Iterator[tuple[Module, ast.expr | None]]:
        """What the callers of a function give for a parameter."""
        owner, known = module.class_of(function), parameters(function)
        called = owner.name if owner is not None and function.name == "__init__" else function.name
        position = list(known).index(name) - (1 if next(iter(known)) in ("self", "cls") else 0)
        for caller, call, _ in self.program.calls(called) if position >= 0 else ():  # nobody is given self
            node = argument(call, name, position)
            uncertain = spread(call) or any(isinstance(given, ast.Starred) for given in call.args)
            yield (caller, node) if node is not None else (module, None if uncertain else known[name])

    def _imported(self, module: Module, name: str) -> Iterator[tuple[Module, ast.expr | None]]:
        full = module.imports.get(name)
        for source in [full] if full else module.starred:
            other = self.program.by_name.get(source)
            if other is not None:
                bindings = other.bindings(other.tree, full.rsplit(".", 1)[-1] if full else name)
                yield from ((other, binding.node) for binding in bindings)

    def _with_items(self, module: Module, node: ast.Name, table: Table) -> Table:
        """A dict with what d["key"] = value and d.update(other) put in, wherever they stand in the function."""
        function, table = module.function_of(node), Table(dict(table.entries), table.complete)
        for target, given in module.assigns:
            if isinstance(target, ast.Subscript) and _is_name(target.value, node.id):
                key = self.value(module, target.slice).what
                if not isinstance(key, str):
                    table = Table(table.entries, False)
                elif self.runs(module, target) is not False:
                    before, now = table.entries.get(key), self.value(module, given)
                    table.entries[key] = now if before is None else merged([before, now])
        for call in module.calls:
            updates = module.dotted(call.func) == f"{node.id}.update" and call.args
            if updates and module.function_of(call) is function and self.runs(module, call) is not False:
                table = table.plus(self.value(module, call.args[0]))
        return table

    # ------------------------------------------------------------------ settings, attributes, items

    def _looked_up(self, module: Module, node: ast.expr, default: ast.expr | None = None) -> Value:
        """A name of a holder: config.key, config["key"], config.get("key", default), getattr(args, "key", default)."""
        if isinstance(node, ast.Attribute) and _is_name(node.value, "self"):
            return merged(self.value(m, origin) for m, origin in self.origins(module, node))
        *before, name = _path(node) or [""]
        holder = self.value(module, _holder(node))
        if isinstance(holder.what, Table):
            found = holder.what.entries.get(name)
            return found or (self.value(module, default) if holder.what.complete else Value())
        other = self.program.by_name.get(module.dotted(node.value) or "") if isinstance(node, ast.Attribute) else None
        if other is not None and (bindings := other.bindings(other.tree, name)):
            return merged(self.value(other, binding.node) for binding in bindings)
        if before and name == "type" and "device" in before[-1].lower():
            return Value("cuda")
        carried = [at for at, one in enumerate(before) if self.carries_settings(one)]
        if not carried:
            return Value()
        setting = self.settings.of((*before[carried[-1] + 1 :], name))
        if setting is None and default is not None and self.settings.config is not None:
            return self.value(module, default)
        return setting or Value()

    def carries_settings(self, name: str) -> bool:
        """Whether what is called so has settings for its attributes."""
        found = self.program.find_class(name)
        return bool(_CARRIER.fullmatch(name)) or (found is not None and is_settings_class(found[1]))

    def _call(self, module: Module, node: ast.Call) -> Value:
        name = module.dotted(node.func) or ""
        if name in self.answers:
            return Value(self.answers[name])
        if name in _PLAIN_CALLS and not node.keywords:
            given = [self.value(module, one) for one in node.args]
            spread_out = given[0].what if len(given) == 1 and isinstance(given[0].what, tuple) else given
            return _computed(_PLAIN_CALLS[name], *spread_out)
        if name == "dict":
            pairs: list[tuple[ast.expr | None, ast.expr]] = [(None, one) for one in node.args]
            pairs += [(ast.Constant(k.arg, lineno=node.lineno) if k.arg else None, k.value) for k in node.keywords]
            return self._dict(module, pairs)
        if _path(node):
            has_default = len(node.args) == (3 if name == "getattr" else 2)
            return self._looked_up(
                module, node, node.args[-1] if has_default else ast.Constant(None, lineno=node.lineno)
            )
        return Value()

    # ------------------------------------------------------------------ conditions

    def runs(self, module: Module, node: ast.AST, within: ast.AST | None = None) -> bool | None:
        """Whether a node runs each time `within` (or its function) does; None where a condition cannot be told."""
        below, certain = node, True
        for above in module.around(node):
            if isinstance(above, ast.For | ast.While) and _skipped(above.body, below):
                certain = False
            if above is within or (within is None and isinstance(above, ast.FunctionDef)):
                return certain or None
            if isinstance(above, ast.If | ast.IfExp) and below is not above.test:
                then = below is above.body if isinstance(above, ast.IfExp) else below in above.body
                test = self.value(module, above.test)
                if test.known and bool(test.what) is not then:
                    return False
                certain &= test.known or (then and _on_one_rank(ast.unparse(above.test)))
            elif isinstance(above, ast.BoolOp):
                certain &= below is above.values[0]
            elif isinstance(above, ast.FunctionDef | ast.Lambda | ast.ExceptHandler | ast.ClassDef):
                certain = False
            below = above
        return (certain or None) if within is None else None


def is_settings_class(node: ast.ClassDef) -> bool:
    """Whether a class is called like a holder of settings: CFG, TrainConfig, TrainingArguments."""
    return bool(re.search(r"(cfg|config|conf|settings|arguments|args|options|hparams|hyperparam\w*)$", node.name, re.I))


def _is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _holder(node: ast.expr) -> ast.expr | None:
    """What a name is looked up in."""
    match node:
        case ast.Attribute(value=holder) | ast.Subscript(value=holder):
            return holder
        case ast.Call(func=ast.Name(id="getattr"), args=[holder, *_]):
            return holder
        case ast.Call(func=ast.Attribute(value=holder)):
            return holder
    return None


def _path(node: ast.expr | None) -> list[str]:
    """The names that lead to a setting: cfg.train["amp"] → cfg, train, amp. Empty where it is something else."""
    match node:
        case ast.Name(id=name):
            return [name]
        case ast.Attribute(attr=name):
            pass
        case ast.Subscript(slice=ast.Constant(value=str(name))):
            pass
        case ast.Call(func=ast.Attribute(attr="get"), args=[ast.Constant(value=str(name)), *_]):
            pass
        case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(name)), *_]):
            pass
        case _:
            return []
    before = _path(_holder(node))
    return [*before, name] if before else []


def _plain(what: Any) -> Any:
    return [value.what for value in what] if isinstance(what, tuple) else what


def _computed(function: Callable[..., Any] | None, *values: Value) -> Value:
    """A function of known values."""
    if function is None or not all(value.known for value in values):
        return Value()
    try:
        return Value(function(*(value.what for value in values)))
    except Exception:  # whatever the user's arithmetic may raise: it is not ours to run into
        return Value()


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
