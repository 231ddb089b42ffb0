"""Values that are changed as the script reads them: no file is rewritten, and it works under every launcher.

A knob is `--batch-size` (argparse), `configs/train.yaml:train.batch_size` (YAML, JSON),
`yaml:train.batch_size` where text without a file was read, or `config.py:BATCH_SIZE`: there the assignment
itself is changed, so that what is computed from it follows. Standard library only: it is at work before
torch is imported.
"""

from __future__ import annotations

import ast
import functools
import importlib.machinery
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.inside.changes.ledger import Ledger
from flatout.redact import redact_setting

if TYPE_CHECKING:
    from flatout.model.plan import Change

_Place = tuple[ast.expr, Callable[[ast.expr], None]]  # a value in a module, and what puts another in its place


class Knobs:
    """The changes of a plan that are made by a knob."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        turned = [change for change in ledger.changes.values() if change.knob]
        self._options = [change for change in turned if change.knob.startswith("-")]
        self._keys = [(change, *change.knob.rpartition(":")[::2]) for change in turned if change not in self._options]
        if any(file.endswith(".py") for _, file, _ in self._keys):
            self._change_modules()

    def arguments(self, parser: Any, namespace: Any) -> None:
        """The command line has been parsed."""
        for change in self._options:
            for action in parser._actions:
                if change.knob in action.option_strings and hasattr(namespace, action.dest):
                    self._replace(change, vars(namespace), action.dest)

    def loaded(self, source: str, file: Any, values: Any) -> None:
        """A YAML or JSON text has been read; `file` is its name, if it has one."""
        for change, named, key in self._keys:
            if named == source if file is None else _same_file(named, file):
                place = _find(values, key.split("."))
                if place is not None:
                    self._replace(change, *place)
                else:
                    self._ledger.refused(change.name, f"there is no {change.knob}")

    def _replace(self, change: Change, holder: Any, key: Any) -> None:
        before = repr(redact_setting(change.knob, holder[key]))
        holder[key] = change.value
        self._say(change, "read as", before)

    def _say(self, change: Change, how: str, before: str) -> None:
        new = redact_setting(change.knob, change.value)
        self._ledger.made_by_knob(change.name, f"{change.knob} {how} {new!r} instead of {before}")

    # -- Python config modules

    def _change_modules(self) -> None:
        loader: Any = importlib.machinery.SourceFileLoader
        get_code = loader.get_code

        @functools.wraps(get_code)
        def get_changed_code(self_: Any, fullname: str) -> Any:
            path = self_.get_filename(fullname)
            ours = [
                (change, key) for change, file, key in self._keys if file.endswith(".py") and _same_file(file, path)
            ]
            if not ours:
                return get_code(self_, fullname)
            tree = ast.parse(self_.get_data(path), path)
            for change, key in ours:
                self._ledger.attempt(change.name, self._assign, tree, change, key)
            return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)

        loader.get_code = get_changed_code

    def _assign(self, tree: ast.Module, change: Change, key: str) -> None:
        """Put the value where the module, a class in it or a dict in it says what `key` is."""
        places = list(_assignments(tree.body, key.split(".")))
        for before, put in places:
            put(ast.copy_location(ast.parse(repr(change.value), mode="eval").body, before))
            self._say(change, "set to", redact_setting(change.knob, ast.unparse(before)))
        if not places:
            self._ledger.refused(change.name, f"nothing is assigned to {key} in {change.knob.rpartition(':')[0]}")


def _assignments(body: list[ast.stmt], path: list[str]) -> Iterator[_Place]:
    name, rest = path[0], path[1:]
    for statement in body:
        if isinstance(statement, ast.ClassDef) and statement.name == name and rest:
            yield from _assignments(statement.body, rest)
        elif isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                yield from _entries(statement.value, functools.partial(setattr, statement, "value"), rest)


def _entries(value: ast.expr, put: Callable[[ast.expr], None], path: list[str]) -> Iterator[_Place]:
    if not path:
        yield value, put
    elif isinstance(value, ast.Dict):
        for at, key in enumerate(value.keys):
            if isinstance(key, ast.Constant) and str(key.value) == path[0]:
                yield from _entries(value.values[at], functools.partial(value.values.__setitem__, at), path[1:])


def _find(values: Any, path: list[str]) -> tuple[Any, Any] | None:
    """What holds the value at the end of a path of keys, and its key, of whatever type; None where
    there is none."""
    keys: Iterable[Any] = ()
    if isinstance(values, dict):
        keys = values
    elif isinstance(values, list):
        keys = range(len(values))
    for key in keys:
        if str(key) == path[0]:
            return (values, key) if len(path) == 1 else _find(values[key], path[1:])
    return None


def _same_file(one: str, other: Any) -> bool:
    try:
        return Path(one).resolve() == Path(str(other)).resolve()
    except OSError:
        return False
