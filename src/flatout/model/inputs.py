"""What people write (YAML, JSON, notebooks), read so that no text can hold up or end the process.

    file ─► text_of (a limit on size) ─► load_yaml, read_settings, load_json (limits on nesting and aliases)

Whatever is wrong with a text is a UsageError of one line that names the file and, where it can be told, the
line. PyYAML is imported only where YAML is read: a plan also travels into a Python that may lack it.
"""

from __future__ import annotations

import ast
import difflib
import functools
import io
import json
import os
import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, NoReturn

from flatout.model.errors import UsageError

MOST_BYTES = 1_000_000
MOST_NODES = 100_000  # of a YAML text, each counted as often as aliases repeat it
MOST_NOTEBOOK_BYTES = 100_000_000  # notebooks contain their pictures
# Cell magics that are followed by Python.
_PYTHON_CELLS = ("%%time", "%%timeit", "%%capture", "%%prun", "%%flatout")
_MAGIC = re.compile(r"(?m)^([ \t]*)(?:[%!?](?:.*\\\n)*.*|[\w.]+\?+[ \t]*$)")
_ASSIGNED_MAGIC = re.compile(r"(?m)^([ \t]*[\w., ]+= *)[%!].*")
DEEPEST = 100
LONGEST_KEY = 200  # letters
_LETTERS_A_NODE = 100  # a long text counts as so many nodes: aliases can repeat that too
_SHORT = 60
Settings = dict[tuple[str, ...], tuple[Any, int]]  # by path: value and line
Cells = list[tuple[int, int]]  # of each code cell: how many lines come before it, its number from 1
UNREAD: Any = object()  # a value that only the program it was written for can read


def text_of(path: Path, most_bytes: int = MOST_BYTES) -> str:
    """The text in a file that a person named."""
    try:
        with path.open("rb") as file:
            data = file.read(most_bytes + 1)
    except FileNotFoundError:
        raise UsageError(f"no such file: {path}") from None
    except (OSError, ValueError) as problem:  # a name with a NUL in it is a ValueError
        raise UsageError(f"cannot read {path}: {getattr(problem, 'strerror', None) or problem}") from None
    if len(data) > most_bytes:
        raise UsageError(f"{path} is larger than {most_bytes // 1_000_000} MB: that is not what belongs here")
    try:
        return io.StringIO(data.decode("utf-8-sig"), newline=None).read()
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not text in UTF-8") from None


def is_file(path: Path) -> bool:
    """Whether there is a file of a name that somebody wrote, which may be none at all."""
    return os.path.isfile(path)  # noqa: PTH113  Path.is_file raises where a name is too long


def is_folder(path: Path) -> bool:
    """Whether there is a folder of a name that somebody wrote."""
    return os.path.isdir(path)  # noqa: PTH112


def check_writable(target: Path, *, folder: bool = False) -> None:
    """Raise a UsageError with the reason where a file, or a folder, cannot be written."""
    parent = target.absolute().parent
    if not is_folder(parent):
        raise UsageError(f"cannot write {target}: there is no folder {parent}")
    if is_folder(target) and not folder:
        raise UsageError(f"cannot write {target}: it is a folder")
    try:
        exists = target.exists()
    except OSError as problem:
        raise UsageError(f"cannot write {target}: {problem.strerror}") from None
    if not os.access(target if exists else parent, os.W_OK):
        raise UsageError(f"cannot write {target}: no permission, or a read-only disk")


def short(value: Any) -> str:
    """A value as it is shown in a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= _SHORT else f"{text[: _SHORT - 3]}…"


def did_you_mean(word: str, known: Collection[str]) -> str:
    """The word that is known and begins so, or the nearest one; else all of them."""
    near = [name for name in known if name.startswith(word)] or difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"


def load_json(text: str, where: str) -> Any:
    """What a JSON text says."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as problem:
        raise UsageError(f"{where}, line {problem.lineno}: this is not JSON: {problem.msg}") from None
    except RecursionError:
        raise UsageError(f"{where}: nested too deeply to be read") from None
    except ValueError as problem:  # a number with thousands of digits
        raise UsageError(f"{where}: a number in it cannot be read ({problem})") from None


def load_yaml(text: str, where: str, loader: Any = None) -> Any:
    """What a YAML text says; `loader` is a kind of `yaml_loader()`. The same key twice is a mistake."""
    return _read(text, where, loader or yaml_loader(), lambda reader: reader.get_single_data())


def read_settings(path: Path) -> Settings:
    """The settings in a YAML or JSON file by their path (`train`, `amp`), each with its line."""
    text = text_of(path)
    if path.suffix == ".json":
        load_json(text, str(path))
        text = text.replace("\t", " ")  # JSON is YAML but for tabs between its tokens
    settings: Settings = _read(text, str(path), yaml_loader(), _settings)
    return settings


def _settings(reader: Any) -> Settings:
    reader.keys_once = False  # the program that the file was written for takes the last one
    root = reader.get_node() if reader.check_node() else None
    if root is None:
        return {}
    if root.id != "mapping":
        raise UsageError(f"{reader.name} holds no settings: not a mapping of names to values")
    return _settings_in(reader, root, ())


def _settings_in(reader: Any, mapping: Any, above: tuple[str, ...]) -> Settings:
    found: Settings = {}
    for key, node in mapping.value:
        path = (*above, str(key.value))
        if key.tag == "tag:yaml.org,2002:merge":  # <<: *defaults
            for source in node.value if node.id == "sequence" else [node]:
                if source.id == "mapping":
                    found = _settings_in(reader, source, above) | found
        elif node.id == "mapping":
            found |= _settings_in(reader, node, path)
        else:
            try:
                value = reader.construct_object(node, deep=True)
            except Exception:  # a tag of the user's own, a date that is none: for their loader
                value = UNREAD
            found[path] = value, key.start_mark.line + 1
    return found


def _read(text: str, where: str, loader: Any, read: Callable[[Any], Any]) -> Any:
    import yaml

    try:
        reader = loader(text)
        reader.name = where
        return read(reader)
    except UsageError:
        raise
    except yaml.YAMLError as problem:
        mark = getattr(problem, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        what = getattr(problem, "problem", None) or str(problem).splitlines()[0]
        raise UsageError(f"{where}{line}: this is not YAML: {what}") from None
    except Exception as problem:  # PyYAML takes a tag's word for what follows it: `!!set 3` is a TypeError
        why = f"{type(problem).__name__}: {problem}"
        raise UsageError(f"{where}: this is not YAML that can be read ({why})") from None


@functools.cache
def yaml_loader() -> Any:
    """PyYAML's SafeLoader with limits."""
    import yaml

    class Loader(yaml.SafeLoader):
        keys_once = True

        def __init__(self, stream: str) -> None:
            super().__init__(stream)
            self._level = 0
            self._sizes: dict[int, tuple[int, int]] = {}  # of each node: how many with all in it, how deep

        def compose_node(self, parent: Any, index: Any) -> Any:
            event: Any = self.peek_event()  # type: ignore[no-untyped-call]
            self._level += 1
            if self._level > DEEPEST:
                _refuse(f"it is nested deeper than {DEEPEST} levels", event)
            node = super().compose_node(parent, index)
            self._level -= 1
            if not isinstance(event, yaml.AliasEvent):
                self._measure(node)
            elif id(node) not in self._sizes:
                _refuse(f"*{event.anchor} contains itself", event)
            return node

        def _measure(self, node: Any) -> None:
            inner, size = node.value, 1
            if node.id == "scalar":
                inner, size = (), 1 + len(node.value) // _LETTERS_A_NODE
            elif node.id == "mapping":
                self._check_keys([key for key, _ in inner if key.id == "scalar"])
                inner = [one for pair in inner for one in pair]
            sizes = [self._sizes[id(one)] for one in inner]
            size += sum(nodes for nodes, _ in sizes)
            depth = 1 + max((deep for _, deep in sizes), default=0)
            self._sizes[id(node)] = size, depth
            if max(size, len(self._sizes)) > MOST_NODES:
                _refuse(f"it holds more than {MOST_NODES:,} values, those that aliases repeat counted again", node)
            if depth > DEEPEST:
                _refuse(f"with its aliases it is nested deeper than {DEEPEST} levels", node)

        def _check_keys(self, keys: list[Any]) -> None:
            seen = set()
            for key in keys if self.keys_once else ():
                if len(key.value) > LONGEST_KEY:
                    _refuse(f"a key of {len(key.value)} letters", key)
                if key.value in seen and key.value != "<<":
                    _refuse(f"{key.value} is there twice", key)
                seen.add(key.value)

        def construct_object(self, node: Any, deep: bool = False) -> Any:
            try:
                value = super().construct_object(node, deep)
                if isinstance(value, int):
                    str(value)  # Python refuses numbers of thousands of digits, one to base 16 only here
                return value
            except yaml.YAMLError:
                raise
            except Exception:  # a date that is none, `!!int x`
                if node.id != "scalar":
                    raise
                _refuse(f"{short(node.value)} is not a valid {node.tag.rpartition(':')[2]}", node)

    return Loader


def _refuse(problem: str, at: Any) -> NoReturn:
    """For YAML that is right, and yet not read."""
    raise UsageError(f"{at.start_mark.name}, line {at.start_mark.line + 1}: {problem}")


# The Python of a Jupyter notebook. Every line keeps its place in its cell, so that a message can say
# `train.ipynb cell 3:12`.


def read_notebook(path: Path) -> tuple[str, Cells]:
    """The code of a notebook, and where in it each cell begins."""
    return as_script(code_cells(load_json(text_of(path, MOST_NOTEBOOK_BYTES), str(path)), str(path)))


def code_cells(notebook: Any, where: str) -> list[tuple[int, str]]:
    """The text of each code cell of a notebook, with its number among all cells, from 1."""
    cells = notebook.get("cells") if isinstance(notebook, dict) else None
    if not isinstance(cells, list) or not all(isinstance(cell, dict) for cell in cells):
        raise UsageError(f"{where} is not a notebook of format 4: save it with a current Jupyter")
    found = []
    for number, cell in enumerate(cells, 1):
        source = cell.get("source") or ""
        text = "".join(map(str, source)) if isinstance(source, list) else str(source)
        if cell.get("cell_type") == "code" and text.strip():
            found.append((number, text))
    return found


def as_script(cells: Iterable[tuple[int, str]]) -> tuple[str, Cells]:
    """The code of numbered cells as one text, and where in it each cell begins."""
    lines: list[str] = []
    begins: Cells = []
    for number, text in cells:
        begins.append((len(lines), number))
        lines += python_lines(text)
    return "\n".join(lines), begins


def python_lines(cell: str) -> list[str]:
    """The lines of a cell; those that are not Python become `pass`."""
    first, _, rest = cell.lstrip("\n").partition("\n")
    if first.startswith("%%"):
        if first.split()[0] not in _PYTHON_CELLS:
            return ["pass"] + [""] * cell.count("\n")
        cell = f"pass\n{rest}"
    if not _parses(cell):  # if it does, a line that begins with % is the rest of an expression
        cell = _ASSIGNED_MAGIC.sub(r"\1None", cell)
        cell = _MAGIC.sub(lambda magic: f"{magic[1]}pass" + "\n" * magic[0].count("\n"), cell)
    return cell.split("\n")


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
