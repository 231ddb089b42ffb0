"""What people write for flatout to read (YAML, JSON, notebooks), read so that no text can hold up or end the
process.

    file ─► text_of (a limit on its size) ─► load_yaml, read_settings, load_json (limits on nesting and on aliases)

Whatever is wrong with a text is a UsageError of one line that names the file and, where it can be told, the
line. PyYAML is imported only where YAML is read: a plan also travels into a Python that may lack it.
"""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flatout.model.errors import UsageError

__all__ = [
    "UNREAD",
    "is_file",
    "is_folder",
    "load_json",
    "load_yaml",
    "read_settings",
    "short",
    "text_of",
    "yaml_loader",
]

MOST_BYTES = 1_000_000
MOST_NODES = 100_000  # of a YAML text, each counted as often as aliases repeat it
DEEPEST = 100
LONGEST_NUMBER = 100  # digits
LONGEST_KEY = 200  # letters
_LETTERS_A_NODE = 100  # a long text counts as so many nodes: aliases can repeat that too
_SHORT = 60
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
    try:
        return path.is_file()
    except (OSError, ValueError):  # too long, a NUL in it
        return False


def is_folder(path: Path) -> bool:
    """Whether there is a folder of a name that somebody wrote."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def short(value: Any) -> str:
    """A value as it is shown in a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= _SHORT else f"{text[: _SHORT - 3]}…"


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


def read_settings(path: Path) -> dict[tuple[str, ...], tuple[Any, int]]:
    """The settings in a YAML or JSON file by their path (`train`, `amp`), each with its line."""
    import yaml

    text = text_of(path)
    if path.suffix == ".json":
        load_json(text, str(path))
        text = text.replace("\t", " ")  # JSON is YAML but for tabs between its tokens

    def read(reader: Any) -> Any:
        reader.keys_once = False  # the program that the file was written for takes the last one
        return reader.get_node() if reader.check_node() else None

    root = _read(text, str(path), yaml_loader(), read)
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise UsageError(f"{path} holds no settings: not a mapping of names to values")
    return _settings_in(root, ())


def _settings_in(mapping: Any, above: tuple[str, ...]) -> dict[tuple[str, ...], tuple[Any, int]]:
    import yaml

    found: dict[tuple[str, ...], tuple[Any, int]] = {}
    for key, node in mapping.value:
        path = (*above, str(key.value))
        if key.tag == "tag:yaml.org,2002:merge":  # <<: *defaults
            for source in node.value if isinstance(node, yaml.SequenceNode) else [node]:
                if isinstance(source, yaml.MappingNode):
                    found = _settings_in(source, above) | found
        elif isinstance(node, yaml.MappingNode):
            found |= _settings_in(node, path)
        else:
            try:
                value = yaml.constructor.SafeConstructor().construct_object(node, deep=True)
            except Exception:  # a tag of the user's own, or a date that is none: only their loader knows what it means
                value = UNREAD
            found[path] = value, key.start_mark.line + 1
    return found


def _read(text: str, where: str, loader: Any, read: Callable[[Any], Any]) -> Any:
    import yaml

    try:
        return read(loader(text))
    except yaml.YAMLError as problem:
        mark = getattr(problem, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        what = getattr(problem, "problem", None) or str(problem).splitlines()[0]
        ours = isinstance(problem, _refusal())
        raise UsageError(f"{where}{line}: {what if ours else f'this is not YAML: {what}'}") from None
    except Exception as problem:  # PyYAML takes a tag's word for what follows it: `!!set 3` is a TypeError
        raise UsageError(f"{where}: this is not YAML that can be read ({type(problem).__name__}: {problem})") from None


@functools.cache
def _refusal() -> Any:
    """YAML that is right, and yet not read."""
    import yaml

    class Refusal(yaml.MarkedYAMLError):
        def __init__(self, problem: str, at: Any) -> None:
            super().__init__(None, None, problem, at.start_mark)

    return Refusal


@functools.cache
def yaml_loader() -> Any:
    """PyYAML's SafeLoader with limits."""
    import yaml

    refusal = _refusal()

    class Loader(yaml.SafeLoader):
        keys_once = True

        def __init__(self, stream: str) -> None:
            super().__init__(stream)
            self._level = 0
            self._sizes: dict[int, tuple[int, int]] = {}  # of each node: how many with all in it, how deep

        def compose_node(self, parent: Any, index: Any) -> Any:
            event: Any = self.peek_event()  # type: ignore[no-untyped-call]
            if isinstance(event, yaml.AliasEvent):
                node = super().compose_node(parent, index)
                if id(node) not in self._sizes:
                    raise refusal(f"*{event.anchor} contains itself", event)
                return node
            self._level += 1
            if self._level > DEEPEST:
                raise refusal(f"it is nested deeper than {DEEPEST} levels", event)
            node = super().compose_node(parent, index)
            self._level -= 1
            size = self._sizes[id(node)] = self._measured(node)
            if max(size[0], len(self._sizes)) > MOST_NODES:
                raise refusal(
                    f"it holds more than {MOST_NODES:,} values, those that aliases repeat counted again", event
                )
            if size[1] > DEEPEST:
                raise refusal(f"with its aliases it is nested deeper than {DEEPEST} levels", event)
            return node

        def _measured(self, node: Any) -> tuple[int, int]:
            if isinstance(node, yaml.ScalarNode):
                if node.tag == "tag:yaml.org,2002:int" and len(node.value) > LONGEST_NUMBER:
                    raise refusal(f"a number of {len(node.value)} digits", node)
                return 1 + len(node.value) // _LETTERS_A_NODE, 1
            inner = node.value
            if isinstance(node, yaml.MappingNode):
                self._check_keys([key for key, _ in inner if isinstance(key, yaml.ScalarNode)])
                inner = [one for pair in inner for one in pair]
            sizes = [self._sizes[id(one)] for one in inner]
            return 1 + sum(size for size, _ in sizes), 1 + max((deep for _, deep in sizes), default=0)

        def _check_keys(self, keys: list[Any]) -> None:
            seen = set()
            for key in keys if self.keys_once else ():
                if len(key.value) > LONGEST_KEY:
                    raise refusal(f"a key of {len(key.value)} letters", key)
                if key.value in seen and key.value != "<<":
                    raise refusal(f"{key.value} is there twice", key)
                seen.add(key.value)

        def construct_object(self, node: Any, deep: bool = False) -> Any:
            try:
                return super().construct_object(node, deep)
            except yaml.YAMLError:
                raise
            except Exception as problem:  # a date that is none, `!!int x`
                if not isinstance(node, yaml.ScalarNode):
                    raise
                raise refusal(f"{short(node.value)} is not a valid {node.tag.rpartition(':')[2]}", node) from problem

    return Loader
