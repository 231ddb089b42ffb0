"""A Python file being edited: arguments of calls, values of settings, torch's switches, autocast.

A name counts as torch's where an import is all that gives it a meaning in its file. None instead of
an edit says that it cannot be told from the source alone what to write.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from flatout.check.script import Node, SourceFile, argument, last_name, parents
from flatout.fix.edit_text import EditedText, Splice

_POSITIONS = {"num_workers": 5, "pin_memory": 7}  # of what a DataLoader may be given without a name
_BRACKET = re.compile(r"#[^\r\n]*|\)")
_LINE_IS_OVER = re.compile(r"[ \t]*,?[ \t]*[\r\n]")
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def is_loader(name: str) -> bool:
    """Whether this is the full name of PyTorch's DataLoader."""
    return name in ("torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader")


def is_optimizer(name: str) -> bool:
    """Whether this is the full name of an optimizer of torch's."""
    return name.startswith("torch.optim.")


class PythonText(EditedText):
    """A Python file. Raises UsageError where it is none."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._nodes = SourceFile(path).nodes
        self._module: ast.Module = self._nodes[0]
        self._meanings = _meanings(self._nodes)

    # -- arguments

    def set_argument(self, line: int, is_meant: Callable[[str], bool], name: str, code: str) -> list[Splice] | None:
        """Give an argument to the one call at a line of what `is_meant` knows by its full name."""
        call = self._call_at(line, is_meant)
        return self._given(call, name, code) if call is not None else None

    def use_flatout_loader(self, line: int) -> list[Splice] | None:
        """Make the DataLoader that is made at a line flatout's."""
        call = self._call_at(line, is_loader)
        workers = self._given(call, "num_workers", '"auto"') if call is not None else None
        imported = self._import_flatout(before=line)
        if call is None or workers is None or imported is None:
            return None
        return [*imported, self._in_place_of(call.func, "flatout.DataLoader"), *workers]

    def _call_at(self, line: int, is_meant: Callable[[str], bool]) -> ast.Call | None:
        calls = [
            node
            for node in self._nodes
            if isinstance(node, ast.Call)
            and line in (node.lineno, node.func.end_lineno)
            and is_meant(self._full_name(node.func))
        ]
        return calls[0] if len(calls) == 1 else None

    def _given(self, call: ast.Call, name: str, code: str) -> list[Splice] | None:
        there = argument(call, name, _POSITIONS.get(name))
        by_name = any(keyword.arg == name for keyword in call.keywords)
        spread = any(keyword.arg is None for keyword in call.keywords)
        if not by_name and (spread or any(isinstance(one, ast.Starred) for one in call.args)):
            return None
        if there is not None:
            return [self._in_place_of(there, code)]
        return [self._behind_arguments(call, f"{name}={code}")]

    def _behind_arguments(self, call: ast.Call, code: str) -> Splice:
        """On a line of its own where the last argument has one, and no comment stands behind it."""
        parts: list[Node] = [*call.args, *call.keywords]
        last = max(parts, key=lambda part: (part.end_lineno, part.end_col_offset))
        end, indent = self._end(last), self.text[self.offset(last.lineno) : self._start(last)]
        # Brackets around an argument are no part of its node.
        brackets = [one.end() for one in _BRACKET.finditer(self.text, end, self._end(call) - 1) if one[0] == ")"]
        end = max([end, *brackets])
        if not indent.strip() and _LINE_IS_OVER.match(self.text, end):
            return Splice(end, end, f",{self.newline}{indent}{code}")
        return Splice(end, end, f", {code}")

    # -- settings

    def set_setting(self, keys: Sequence[str], value: Any) -> list[Splice] | None:
        """Assign a value where the module, a class in it or a dict in it says what these keys are."""
        places = _assigned(self._module.body, keys)
        return [self._in_place_of(place, repr(value)) for place in places] or None

    def set_default(self, option: str, before: Any, value: Any) -> list[Splice] | None:
        """Give an option of argparse another default, if `before` is what it is now."""
        call = self._declaration(option)
        default = argument(call, "default") if call is not None else None
        if call is None or default is None or isinstance(argument(call, "action"), ast.Constant):
            return None
        try:
            known = ast.literal_eval(default)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return None
        return [self._in_place_of(default, repr(value))] if known == before else None

    def is_switch(self, option: str) -> bool:
        """Whether an option of argparse is switched on by being there."""
        call = self._declaration(option)
        action = argument(call, "action") if call is not None else None
        return getattr(action, "value", "") == "store_true" or last_name(action) == "BooleanOptionalAction"

    def spellings(self, option: str) -> list[str]:
        """What an option of argparse may be called: -n and --num-workers."""
        call = self._declaration(option)
        values = [one.value for one in call.args if isinstance(one, ast.Constant)] if call is not None else []
        return [value for value in values if isinstance(value, str)]

    def _declaration(self, option: str) -> ast.Call | None:
        calls = [node for node in self._nodes if isinstance(node, ast.Call) and _declares(node, option)]
        return calls[0] if len(calls) == 1 else None

    # -- statements

    def set_switches(self, code: str) -> list[Splice] | None:
        """Statements such as `torch.backends.cudnn.benchmark = True`: where the module has them, or
        behind imports."""
        if not self._has_torch():
            return None
        splices = []
        for statement in code.split("; "):
            sets = _what_it_sets(ast.parse(statement).body[0])
            there = [node for node in self._nodes if _what_it_sets(node).endswith(_last_two(sets))]
            if any(node not in self._module.body or _what_it_sets(node) != sets for node in there):
                return None  # under a condition, or by another name
            splices += [self._in_place_of(node, statement) for node in there] or [self._behind_imports(statement)]
        return splices

    def autocast(self, line: int, device: str) -> list[Splice] | None:
        """Put the statements from the one at a line to the loss, itself or the next one, under bfloat16."""
        first = next((node for node in self._nodes if isinstance(node, ast.Assign) and _spans(node, line)), None)
        if first is None or not self._has_torch():
            return None
        block = next((held for held in _blocks(next(parents(first))) if first in held), [])
        at = block.index(first) if block else 0
        learned = {last_name(name) for name in map(_what_learns, self._nodes) if name is not None}
        under = next((block[at:end] for end in (at + 1, at + 2) if _assigns(block[at:end], learned)), [])
        within = [part for statement in under for part in ast.walk(statement) if isinstance(part, ast.Constant)]
        if not under or any(part.lineno != part.end_lineno for part in within):
            return None
        indent = self.text[self.offset(first.lineno) : self._start(first)]
        if indent.strip():
            return None
        more = "\t" if indent.startswith("\t") else "    "
        starts = [self.offset(number) for number in range(first.lineno, under[-1].end_lineno + 1)]
        head = f'{indent}with torch.autocast("{device}", dtype=torch.bfloat16):{self.newline}'
        indented = (start for start in starts if self.text[start] not in "\r\n")
        return [Splice(starts[0], starts[0], head), *(Splice(start, start, more) for start in indented)]

    def apply_plan(self, plan: str) -> list[Splice]:
        """Two lines at the start of the script that make a plan's changes."""
        start = self.offset(self._first_line())
        lines = ("import flatout", f"flatout.apply({json.dumps(plan, ensure_ascii=False)})")
        return [Splice(start, start, "".join(f"{one}{self.newline}" for one in lines))]

    # -- names

    def _full_name(self, node: Node) -> str:
        """`torch.utils.data.DataLoader`, whatever it was imported as; empty where it may be anything."""
        names: list[str] = []
        while isinstance(node, ast.Attribute):
            names.insert(0, node.attr)
            node = node.value
        meaning = self._meanings.get(node.id, "") if isinstance(node, ast.Name) else ""
        return ".".join([meaning, *names]) if meaning else ""

    def _has_torch(self) -> bool:
        above = [name for one in self._above() if isinstance(one, ast.Import) for name in one.names]
        return self._meanings.get("torch") == "torch" and any(not name.asname for name in above)

    def _import_flatout(self, before: int) -> list[Splice] | None:
        """Import it, unless that is done already; None where the name means something else."""
        names = [alias.name for one in self._above(before) if isinstance(one, ast.Import) for alias in one.names]
        if "flatout" in names and self._meanings.get("flatout") == "flatout":
            return []
        return [self._behind_imports("import flatout", before)] if "flatout" not in self._meanings else None

    def _above(self, before: int | None = None) -> Iterator[Node]:
        """The statements of the module above its first definition, and above a line."""
        for one in self._module.body:
            if isinstance(one, _DEFINITIONS) or (before is not None and one.lineno >= before):
                return
            yield one

    def _behind_imports(self, code: str, before: int | None = None) -> Splice:
        imports = [one for one in self._above(before) if isinstance(one, ast.Import | ast.ImportFrom)]
        last: Node = imports[-1] if imports else None
        start = self.offset(last.end_lineno + 1 if last is not None else self._first_line())
        return Splice(start, start, f"{code}{self.newline}")

    def _first_line(self) -> int:
        """The line of the first statement that is no docstring and no import from __future__."""
        first: Node = next(one for one in self._module.body if not _comes_first(one))
        return int(min([first.lineno, *(one.lineno for one in getattr(first, "decorator_list", []))]))

    # -- places

    def _start(self, node: Node) -> int:
        return self.offset(node.lineno, node.col_offset)

    def _end(self, node: Node) -> int:
        return self.offset(node.end_lineno, node.end_col_offset)

    def _in_place_of(self, node: Node, code: str) -> Splice:
        return Splice(self._start(node), self._end(node), code)

    def _is_sound(self, text: str) -> bool:
        try:
            ast.parse(text.lstrip("\ufeff"))
        except (SyntaxError, ValueError):
            return False
        return True


def _meanings(nodes: Sequence[Node]) -> dict[str, str]:
    """What each imported name stands for; empty where something else in the file has that name too."""
    found: dict[str, set[str]] = {}
    for node in nodes:
        match node:
            case ast.Import(names=names):
                for one in names:
                    name = one.asname or one.name.partition(".")[0]
                    found.setdefault(name, set()).add(one.name if one.asname else name)
            case ast.ImportFrom(module=module, names=names, level=level):
                for one in names:
                    found.setdefault(one.asname or one.name, set()).add(f"{'.' * level}{module or ''}.{one.name}")
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()) | ast.arg(arg=name):
                found.setdefault(name, set()).add("")
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.setdefault(name, set()).add("")
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                found.setdefault(name, set()).add("")
    return {name: next(iter(meant)) if len(meant) == 1 else "" for name, meant in found.items()}


def _assigned(body: Sequence[ast.stmt], keys: Sequence[str]) -> Iterator[Node]:
    """Where the thing of this name, in a class or a dict of the names before, gets its value."""
    name, rest = keys[0], keys[1:]
    for one in body:
        if isinstance(one, ast.ClassDef) and one.name == name and rest:
            yield from _assigned(one.body, rest)
        elif isinstance(one, ast.Assign | ast.AnnAssign) and one.value is not None:
            targets = one.targets if isinstance(one, ast.Assign) else [one.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                yield from _in_dict(one.value, rest)


def _in_dict(value: Node, keys: Sequence[str]) -> Iterator[Node]:
    if keys and isinstance(value, ast.Dict):
        for key, held in zip(value.keys, value.values, strict=True):
            if isinstance(key, ast.Constant) and str(key.value) == keys[0]:
                yield from _in_dict(held, keys[1:])
    elif not keys:
        is_field = isinstance(value, ast.Call) and last_name(value.func) == "field"  # of a dataclass
        yield (argument(value, "default") if is_field else None) or value


def _declares(call: ast.Call, option: str) -> bool:
    texts = [one.value for one in call.args if isinstance(one, ast.Constant)]
    return last_name(call.func) == "add_argument" and option in texts


def _what_it_sets(node: Node) -> str:
    """The attribute that a statement assigns to, or the function it calls; empty for any other."""
    match node:
        case ast.Assign(targets=[target]):
            return ast.unparse(target)
        case ast.Expr(value=ast.Call(func=function)):
            return ast.unparse(function)
    return ""


def _what_learns(node: Node) -> Node:
    """The loss of `loss.backward()`, `scaler.scale(loss).backward()` and `accelerator.backward(loss)`."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name() as loss, attr="backward"), args=[]):
            return loss
        case ast.Call(func=ast.Attribute(attr="backward" | "scale"), args=[ast.Name() as loss]):
            return loss
    return None


def _last_two(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def _spans(node: Node, line: int) -> bool:
    return bool(node.lineno <= line <= node.end_lineno)


def _blocks(node: Node) -> Iterator[list[Node]]:
    """The lists of statements of a node."""
    return (held for held in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")) if held)


def _assigns(statements: list[Node], learned: set[str]) -> bool:
    """Whether each assigns to one name that the next one uses, and the last one the loss."""
    names: list[str] = []
    for one in statements:
        if not isinstance(one, ast.Assign) or not isinstance(one.targets[0], ast.Name) or len(one.targets) > 1:
            return False
        used = {part.id for part in ast.walk(one.value) if isinstance(part, ast.Name)}
        if names and names[-1] not in used:
            return False
        names.append(one.targets[0].id)
    return names[-1] in learned


def _comes_first(statement: ast.stmt) -> bool:
    """Whether it is a docstring, or an import from __future__."""
    if isinstance(statement, ast.ImportFrom):
        return statement.module == "__future__"
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
