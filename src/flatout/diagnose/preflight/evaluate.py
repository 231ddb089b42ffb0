"""What expressions of a Program are worth, as far as that can be told without running it.

Followed are literals, arithmetic, names with one meaning, argparse defaults and the flags given, config files and
config modules, dicts handed on with **, parameters whose callers agree, attributes set once. A GPU is taken to be
there. Everything else is unknown, and so is whatever depends on it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import libcst as cst

from flatout.diagnose.preflight.settings import Command, Config
from flatout.diagnose.preflight.source import Binding, Module, Program, Scope, arguments
from flatout.diagnose.preflight.values import Device, Table, Value, merged

_TOO_DEEP = 40
_BINARY: dict[type[cst.BaseBinaryOp], Callable[[Any, Any], Any]] = {
    cst.Add: operator.add,
    cst.Subtract: operator.sub,
    cst.Multiply: operator.mul,
    cst.Divide: operator.truediv,
    cst.FloorDivide: operator.floordiv,
    cst.Modulo: operator.mod,
    cst.Power: operator.pow,
}
_COMPARE: dict[type[cst.BaseCompOp], Callable[[Any, Any], Any]] = {
    cst.Equal: operator.eq,
    cst.NotEqual: operator.ne,
    cst.LessThan: operator.lt,
    cst.LessThanEqual: operator.le,
    cst.GreaterThan: operator.gt,
    cst.GreaterThanEqual: operator.ge,
    cst.Is: operator.is_,
    cst.IsNot: operator.is_not,
    cst.In: lambda a, b: a in b,
    cst.NotIn: lambda a, b: a not in b,
}
_PLAIN_CALLS: dict[str, Callable[..., Any]] = {
    "int": int, "float": float, "str": str, "bool": bool, "min": min, "max": max, "abs": abs, "round": round,
    "os.path.join": lambda *parts: Path(*parts), "os.path.dirname": lambda path: Path(path).parent,
    "os.path.abspath": Path, "os.path.realpath": Path,
}  # fmt: skip
_CONFIG_READERS = (
    "yaml.safe_load", "yaml.load", "yaml.full_load", "json.load", "json.loads", "runpy.run_path",
    "OmegaConf.load", "omegaconf.OmegaConf.load",
)  # fmt: skip
# Wrappers that give a mapping attributes and change nothing about its values.
_WRAPPERS = (
    "SimpleNamespace", "Namespace", "EasyDict", "edict", "AttrDict", "DotMap", "Munch", "munchify", "Box",
    "create", "to_container", "deepcopy", "copy", "vars",
)  # fmt: skip


class Evaluator:
    """Answers `value(module, expression)`. `machine` has os.cpu_count() and the like, by name."""

    def __init__(
        self, program: Program, *, command: Command, config: Config | None = None, machine: dict[str, Any] | None = None
    ) -> None:
        self.program = program
        self.command = command
        self.config = config
        self.machine = machine or {}
        self._memory: dict[cst.CSTNode, Value] = {}
        self._cuts = 0
        self._open: list[Any] = []
        self.mutated = {
            target.attr.value
            for module in program.modules
            for target, _ in module.assigns
            if isinstance(target, cst.Attribute) and module.dotted(target.value) not in ("self", None)
        }
        self.arguments = Table(complete=False)  # what argparse declares: arguments.py fills it

    # ------------------------------------------------------------------ expressions

    def value(self, module: Module, node: cst.BaseExpression | None) -> Value:
        """What an expression is worth."""
        if node is None:
            return Value()
        if node in self._memory:
            return self._memory[node]
        if len(self._open) > _TOO_DEEP or any(node is other for other in self._open):
            self._cuts += 1
            return Value()
        cuts = self._cuts
        with self._opened(node):
            found = self._evaluated(module, node)
        if cuts == self._cuts:  # an answer that was cut short holds only for the question in whose midst it was asked
            self._memory[node] = found
        return found

    def told(self, module: Module, node: cst.BaseExpression | None) -> Value:
        """The same, with the place of the expression where nothing better is known."""
        found = self.value(module, node)
        if node is None or not found.known or found.where:
            return found
        return Value(found.what, module.where(node), found.knob)

    def take(self, config: Config | None, declared: Table) -> None:
        """Settings that were found since; what was evaluated without them is forgotten."""
        self.config, self.arguments = config, declared
        self._memory.clear()

    @contextmanager
    def _opened(self, key: Any) -> Iterator[None]:
        self._open.append(key)
        try:
            yield
        finally:
            self._open.pop()

    def _evaluated(self, module: Module, node: cst.BaseExpression) -> Value:
        match node:
            case cst.Integer() | cst.Float() | cst.SimpleString():
                return Value(node.evaluated_value, module.where(node))
            case cst.ConcatenatedString():
                return Value(node.evaluated_value) if isinstance(node.evaluated_value, str) else Value()
            case cst.Name():
                return self._name(module, node)
            case cst.Attribute():
                return self._attribute(module, node)
            case cst.Subscript():
                return self._subscript(module, node)
            case cst.Tuple() | cst.List():
                return Value(tuple(self.value(module, element.value) for element in node.elements))
            case cst.Dict():
                return self._dict(module, node)
            case cst.IfExp():
                return self._either(module, node)
            case cst.BooleanOperation():
                return self._boolean(module, node)
            case cst.UnaryOperation():
                return self._unary(module, node)
            case cst.Comparison():
                return self._comparison(module, node)
            case cst.BinaryOperation():
                return self._binary(module, node)
            case cst.NamedExpr():
                return self.value(module, node.value)
            case cst.Call():
                return self._call(module, node)
        return Value()

    def _either(self, module: Module, node: cst.IfExp) -> Value:
        test = self.value(module, node.test)
        if test.known:
            return self.value(module, node.body if test.what else node.orelse)
        return merged([self.value(module, node.body), self.value(module, node.orelse)])

    def _boolean(self, module: Module, node: cst.BooleanOperation) -> Value:
        left, is_and = self.value(module, node.left), isinstance(node.operator, cst.And)
        if left.known:
            if bool(left.what) is not is_and:
                return left
            right = self.value(module, node.right)
            # `cfg.pin_memory and on_gpu`: what is set is the left side; the right only confirms it.
            return left if right.known and right.what is left.what is True else right
        right = self.value(module, node.right)
        return Value(right.what) if right.known and is_and and right.what is False else Value()

    def _unary(self, module: Module, node: cst.UnaryOperation) -> Value:
        operand = self.value(module, node.expression)
        if not operand.known:
            return operand
        if isinstance(node.operator, cst.Not):
            return Value(not operand.what)
        return (
            Value(-operand.what, operand.where)
            if isinstance(node.operator, cst.Minus) and operand.is_number()
            else Value()
        )

    def _comparison(self, module: Module, node: cst.Comparison) -> Value:
        if len(node.comparisons) != 1:
            return Value()
        target = node.comparisons[0]
        # A step counted modulo 1 is 0 every time, whatever the step.
        if isinstance(node.left, cst.BinaryOperation) and isinstance(node.left.operator, cst.Modulo):
            by = self.value(module, node.left.right)
            if by.what == 1 and by.is_number():
                return _computed(_COMPARE.get(type(target.operator)), Value(0), self.value(module, target.comparator))
        return _computed(
            _COMPARE.get(type(target.operator)), self.value(module, node.left), self.value(module, target.comparator)
        )

    def _binary(self, module: Module, node: cst.BinaryOperation) -> Value:
        left, right = self.value(module, node.left), self.value(module, node.right)
        if isinstance(left.what, Table) and isinstance(right.what, Table) and isinstance(node.operator, cst.BitOr):
            return Value(Table(left.what.entries | right.what.entries, left.what.complete and right.what.complete))
        return _computed(_BINARY.get(type(node.operator)), left, right)

    def _dict(self, module: Module, node: cst.Dict) -> Value:
        table = Table()
        for element in node.elements:
            if isinstance(element, cst.DictElement):
                key = self.value(module, element.key)
                if isinstance(key.what, str):
                    table.entries[key.what] = self.told(module, element.value)
                else:
                    table.complete = False
            else:
                self._merge(table, self.value(module, element.value))
        return Value(table)

    @staticmethod
    def _merge(table: Table, other: Value) -> None:
        if isinstance(other.what, Table):
            table.entries |= other.what.entries
            table.complete &= other.what.complete
        else:
            table.complete = False

    # ------------------------------------------------------------------ names

    def _name(self, module: Module, node: cst.Name) -> Value:
        name = node.value
        if name in ("True", "False", "None"):
            return Value({"True": True, "False": False, "None": None}[name], module.where(node))
        if name == "__file__":
            return Value(module.path)
        for scope in module.scopes(node):
            if isinstance(scope, cst.FunctionDef) and _parameter(scope, name) is not None:
                bound = [b for b in module.bindings(scope, name) if not self._is_open(b)]
                return merged([self._parameter_value(module, scope, name), *(self._bound(module, b) for b in bound)])
            if module.bindings(scope, name):
                return self.named(module, scope, name)
        if name in module.imports:
            return self._imported(module, module.imports[name])
        for base in module.starred:
            other = self.program.by_name.get(base)
            if other is not None and other.bindings(other.tree, name):
                return self.named(other, other.tree, name)
        return Value()

    def named(self, module: Module, scope: Scope, name: str) -> Value:
        """What a name is worth in a scope: all places that set it have to agree."""
        if scope is module.tree and self.config is not None and self._runs_config(module):
            over = self.config.table.entries.get(name)
            if over is not None:
                return over
        open_ones = [b for b in module.bindings(scope, name) if not self._is_open(b)]
        taken = [b for b in open_ones if b.node is None or self._reachable(module, b.node)]
        found = merged(self._bound(module, binding) for binding in taken)
        if isinstance(found.what, Table):
            self._add_items(module, scope, name, found.what)
        return found

    def _is_open(self, binding: Binding) -> bool:
        """Whether its value is being found out: `cfg = wrapped(cfg)` asks for what cfg was before."""
        if any(binding is other for other in self._open):
            self._cuts += 1
            return True
        return False

    def _bound(self, module: Module, binding: Binding) -> Value:
        if binding.node is None:
            return Value()
        with self._opened(binding):
            found = self.value(module, binding.node)
        if binding.element is None:
            return found
        return (
            found.what[binding.element]
            if isinstance(found.what, tuple) and binding.element < len(found.what)
            else Value()
        )

    def _reachable(self, module: Module, node: cst.CSTNode) -> bool:
        """Whether no `if` around it is known to go the other way."""
        below = node
        for above in module.around(node):
            if isinstance(above, cst.FunctionDef):
                break
            if isinstance(above, cst.If) and below is not above.test:
                test = self.value(module, above.test)
                if test.known and bool(test.what) is not (below is above.body):
                    return False
            below = above
        return True

    def _add_items(self, module: Module, scope: Scope, name: str, table: Table) -> None:
        """d["key"] = value and d.update(other), wherever they stand in the scope."""
        for target, given in module.assigns:
            if isinstance(target, cst.Subscript) and isinstance(target.value, cst.Name) and target.value.value == name:
                key = self.value(module, _index(target))
                if not isinstance(key.what, str):
                    table.complete = False
                elif given is not target:
                    before, now = table.entries.get(key.what), self.told(module, given)
                    table.entries[key.what] = now if before is None else merged([before, now])
        for call in module.calls:
            here = module.dotted(call.func) == f"{name}.update" and scope in module.scopes(call)
            if here and call.args and self._reachable(module, call):
                self._merge(table, self.value(module, call.args[0].value))

    def _imported(self, module: Module, full: str) -> Value:
        other = self.program.by_name.get(full)
        if other is None:
            return Value()
        last = full.rsplit(".", 1)[-1]
        if other.bindings(other.tree, last):
            return self.named(other, other.tree, last)
        if other.path.stem == last:
            return Value(self.constants(other))
        return Value()

    def constants(self, module: Module) -> Table:
        """What a module sets at its top level."""
        table = Table(complete=False)
        for base in module.starred:
            other = self.program.by_name.get(base)
            if other is not None and other is not module:
                table.entries |= self.constants(other).entries
        for name in module.names_in(module.tree):
            found = self.named(module, module.tree, name)
            if found.known:
                table.entries[name] = Value(found.what, found.where, found.knob or f"{name} =")
        return table

    def _parameter_value(self, module: Module, function: cst.FunctionDef, name: str) -> Value:
        parameter = _parameter(function, name)
        position = _position(function, name)
        owner = module.class_of(function)
        callers = self.program.calls_of(
            function, owner.name.value if owner and function.name.value == "__init__" else None
        )
        method = owner is not None and "staticmethod" not in [module.text(d.decorator) for d in function.decorators]
        values = []
        for caller_module, call in callers:
            given = arguments(call)
            at = position - 1 if position is not None and method else position
            argument = given.get(name, at)
            if argument is not None:
                values.append(self.value(caller_module, argument))
            elif given.rest or given.starred:
                values.append(Value())
            else:
                values.append(self.told(module, parameter.default if parameter else None))
        values += [self.value(m, a) for m, a in self._spawned(function, position)]
        if not values and any("hydra" in module.text(d.decorator) for d in function.decorators):
            return Value(self.config.table) if self.config is not None else Value()
        return merged(values)

    def _spawned(self, function: cst.FunctionDef, position: int | None) -> list[tuple[Module, cst.BaseExpression]]:
        """The argument a function gets through mp.spawn(function, args=(…)), which puts the rank before them."""
        found = []
        for module, call, _ in self.program.calls("spawn"):
            given = arguments(call)
            if not given.positional or position is None:
                continue
            if module.dotted(given.positional[0]) != function.name.value:
                continue
            handed = given.get("args", 1)
            if isinstance(handed, cst.Tuple) and 1 <= position <= len(handed.elements):
                found.append((module, handed.elements[position - 1].value))
        return found

    def sources(
        self, module: Module, node: cst.BaseExpression, depth: int = 6
    ) -> Iterator[tuple[Module, cst.BaseExpression]]:
        """The expressions a name may stand for, through assignments, returns and parameters."""
        if depth == 0:
            return
        if isinstance(node, cst.Name):
            for scope in module.scopes(node):
                for binding in module.bindings(scope, node.value):
                    if binding.node is not None:
                        yield from self.sources(*self._part(module, binding), depth - 1)
                if isinstance(scope, cst.FunctionDef) and _parameter(scope, node.value) is not None:
                    for caller, call in self.program.calls_of(scope):
                        given = arguments(call).get(node.value, _position(scope, node.value))
                        if given is not None:
                            yield from self.sources(caller, given, depth - 1)
                    return
                if module.bindings(scope, node.value):
                    return
        elif isinstance(node, cst.Call) and (found := self.program.function(module, node.func)) is not None:
            for given in self._returned(*found):
                yield from self.sources(found[0], given, depth - 1)
        else:
            yield module, node

    def _part(self, module: Module, binding: Binding) -> tuple[Module, cst.BaseExpression]:
        """What a binding binds: of `a, b = make()` with a function of the program, the part of what it returns."""
        assert binding.node is not None
        if binding.element is not None and isinstance(binding.node, cst.Call):
            found = self.program.function(module, binding.node.func)
            for given in self._returned(*found) if found is not None else ():
                if isinstance(given, cst.Tuple) and binding.element < len(given.elements) and found is not None:
                    return found[0], given.elements[binding.element].value
        return module, binding.node

    @staticmethod
    def _returned(module: Module, function: cst.FunctionDef) -> list[cst.BaseExpression]:
        returns = [n for n in module.nodes if isinstance(n, cst.Return) and module.function_of(n) is function]
        return [r.value for r in returns if r.value is not None]

    # ------------------------------------------------------------------ attributes and items

    def _attribute(self, module: Module, node: cst.Attribute) -> Value:
        name = node.attr.value
        if isinstance(node.value, cst.Name) and node.value.value == "self":
            return self._own_attribute(module, node, name)
        holder = self.value(module, node.value)
        if isinstance(holder.what, Device):
            return Value(holder.what.type) if name == "type" else Value()
        if isinstance(holder.what, Path):
            return Value(getattr(holder.what, name)) if name in ("parent", "stem", "name", "suffix") else Value()
        if isinstance(holder.what, Table):
            return self._entry(holder.what, name)
        if holder.known:
            return Value()
        dotted = module.dotted(node) or ""
        if dotted in ("torch.bfloat16", "torch.float16", "torch.half", "torch.float32"):
            return Value(dotted)
        found = self.program.find_class(module.dotted(node.value) or "?") if isinstance(node.value, cst.Name) else None
        if found is not None:
            return self._entry(self._class_table(*found), name)
        return self._imported(module, dotted)

    def _entry(self, table: Table, name: str) -> Value:
        if name in self.mutated:
            return Value()
        return table.get(name) or Value()

    def _own_attribute(self, module: Module, node: cst.Attribute, name: str) -> Value:
        owner = module.class_of(node)
        if owner is None:
            return Value()
        given = [
            value
            for target, value in module.assigns
            if isinstance(target, cst.Attribute) and target.attr.value == name and module.class_of(target) is owner
            and module.dotted(target.value) == "self"
        ]  # fmt: skip
        if given:
            return merged(self.value(module, value) for value in given)
        return self.named(module, owner, name) if module.bindings(owner, name) else Value()

    def _class_table(self, module: Module, owner: cst.ClassDef) -> Table:
        table = Table(complete=False)
        for name in module.names_in(owner):
            found = self.named(module, owner, name)
            if found.known:
                table.entries[name] = found
        return table

    def _subscript(self, module: Module, node: cst.Subscript) -> Value:
        holder, key = self.value(module, node.value), self.value(module, _index(node))
        if isinstance(holder.what, Table) and isinstance(key.what, str):
            return holder.what.get(key.what) or Value()
        if (
            isinstance(holder.what, tuple)
            and isinstance(key.what, int)
            and -len(holder.what) <= key.what < len(holder.what)
        ):
            found = holder.what[key.what]
            return found if isinstance(found, Value) else Value(found)
        return Value()

    # ------------------------------------------------------------------ calls

    def _call(self, module: Module, node: cst.Call) -> Value:
        name = module.dotted(node.func) or (
            f"?.{node.func.attr.value}" if isinstance(node.func, cst.Attribute) else "?"
        )
        last = name.rsplit(".", 1)[-1]
        given = arguments(node)
        if name in self.machine:
            return Value(self.machine[name], module.where(node))
        if name == "torch.cuda.is_available":
            return Value(True)
        if name == "torch.device":
            kind = self.value(module, given.get("type", 0) or given.get("device"))
            return Value(Device(kind.what.split(":")[0])) if isinstance(kind.what, str) else kind
        if name in _PLAIN_CALLS and not given.rest and not given.starred:
            values = [self.value(module, argument) for argument in given.positional]
            return _computed(_PLAIN_CALLS[name], *values)
        if last == "parse_args" or last == "parse_known_args":
            return Value(self.arguments if last == "parse_args" else (Value(self.arguments), Value()))
        if name in _CONFIG_READERS:
            return Value(self.config.table) if self.config is not None else Value()
        if name == "getattr" and len(given.positional) >= 2:
            return self._looked_up(module, given.positional)
        if last == "get" and isinstance(node.func, cst.Attribute) and given.positional:
            return self._looked_up(module, (node.func.value, *given.positional))
        if last in ("Path", "with_name", "resolve", "absolute", "with_suffix", "joinpath"):
            return self._path(module, node, last, given.positional)
        if last == "dict" and name == "dict":
            return self._keywords(module, node)
        if last in _WRAPPERS and (given.positional or given.rest):
            return self.value(module, (given.positional or given.rest)[0])
        return self._own_call(module, node)

    def _looked_up(self, module: Module, given: Sequence[cst.BaseExpression]) -> Value:
        holder, key = self.value(module, given[0]), self.value(module, given[1])
        if not isinstance(holder.what, Table) or not isinstance(key.what, str):
            return Value()
        found = self._entry(holder.what, key.what)
        if found.known or key.what in self.mutated or holder.what.get(key.what) is not None or not holder.what.complete:
            return found
        return self.told(module, given[2]) if len(given) > 2 else Value(None)

    def _path(self, module: Module, node: cst.Call, last: str, given: Sequence[cst.BaseExpression]) -> Value:
        parts = [self.value(module, part).what for part in given]
        if not all(isinstance(part, str | Path) for part in parts):
            return Value()
        if last == "Path":
            return Value(Path(*parts))
        holder = self.value(module, node.func.value) if isinstance(node.func, cst.Attribute) else Value()
        if not isinstance(holder.what, Path):
            return Value()
        return _computed(lambda path: path if last in ("resolve", "absolute") else getattr(path, last)(*parts), holder)

    def _keywords(self, module: Module, node: cst.Call) -> Value:
        given, table = arguments(node), Table()
        for other in (*given.positional, *given.rest):
            self._merge(table, self.value(module, other))
        for name, value in given.keywords.items():
            table.entries[name] = self.told(module, value)
        return Value(table)

    def _own_call(self, module: Module, node: cst.Call) -> Value:
        """A function or a class of the program itself."""
        found = self.program.function(module, node.func)
        if found is not None:
            other, function = found
            if any(isinstance(n, cst.Yield) and other.function_of(n) is function for n in other.nodes):
                return Value()
            return merged(self.value(other, given) for given in self._returned(other, function))
        if isinstance(node.func, cst.Name):
            owner = self.program.find_class(module.dotted(node.func) or "?")
            if owner is not None:
                table = self._class_table(*owner)
                for name, value in arguments(node).keywords.items():
                    if name in table.entries:
                        table.entries[name] = self.told(module, value)
                return Value(table)
        return Value()

    @staticmethod
    def _runs_config(module: Module) -> bool:
        return any(module.dotted(call.func) == "exec" for call in module.calls)


def _computed(function: Callable[..., Any] | None, *values: Value) -> Value:
    """A function of known values; the place is that of the first that has one."""
    if function is None or not all(value.known for value in values):
        return Value()
    try:
        found = function(*(value.what for value in values))
    except Exception:  # whatever the user's arithmetic may raise: it is not ours to run into
        return Value()
    return Value(
        found,
        next((value.where for value in values if value.where), None),
        next((v.knob for v in values if v.knob), None),
    )


def _index(node: cst.Subscript) -> cst.BaseExpression | None:
    inside = node.slice[0].slice if len(node.slice) == 1 else None
    return inside.value if isinstance(inside, cst.Index) else None


def _parameter(function: cst.FunctionDef, name: str) -> cst.Param | None:
    parameters = function.params
    every = (*parameters.posonly_params, *parameters.params, *parameters.kwonly_params)
    extra = [p for p in (parameters.star_arg, parameters.star_kwarg) if isinstance(p, cst.Param)]
    return next((p for p in (*every, *extra) if p.name.value == name), None)


def _position(function: cst.FunctionDef, name: str) -> int | None:
    names = [p.name.value for p in (*function.params.posonly_params, *function.params.params)]
    return names.index(name) if name in names else None
