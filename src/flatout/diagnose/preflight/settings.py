"""Settings that are not in the source: a config file (YAML, JSON), and the command that starts the training.

A config file becomes a Table whose values know their line. A shell script is searched for the line that starts Python.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flatout.diagnose.preflight.values import UNKNOWN, Table, Value
from flatout.errors import UsageError

_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "torch.distributed.run", "torch.distributed.launch")
_RANKS = re.compile(r"--?(?:nproc[-_]per[-_]node|num_processes|num_gpus)[= ](\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """How a training is started: its script, the flags it gets, and under which launcher with how many ranks."""

    script: Path
    flags: tuple[str, ...] = ()
    where: str | None = None
    launcher: str | None = None
    ranks: int | None = None
    known: bool = False  # False: only the script was named; how it is started is anybody's guess

    def flag(self, *names: str) -> str | bool | None:
        """What a flag was set to: its text, True where nothing follows it, None where it was not given."""
        for position, word in enumerate(self.flags):
            name, equals, text = word.partition("=")
            if name not in names:
                continue
            if equals:
                return text
            after = self.flags[position + 1] if position + 1 < len(self.flags) else "--"
            return True if after.startswith("--") else after
        return None


@dataclass(slots=True)
class Config:
    """A config file that was read."""

    path: Path
    table: Table = field(default_factory=Table)


def shown(path: Path) -> str:
    """A path as short as it can be said from here."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def text_of(path: Path) -> str:
    """What is in a file a person named."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UsageError(f"no such file: {path}") from None
    except OSError as problem:
        raise UsageError(f"cannot read {path}: {problem.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not text in UTF-8") from None


def read_data(path: Path) -> Config:
    """A YAML or JSON file, with the line of every key."""
    import yaml

    text = text_of(path)
    if path.suffix == ".json":
        try:
            data = json.loads(text)
        except json.JSONDecodeError as problem:
            raise UsageError(f"{path}:{problem.lineno}: not JSON: {problem.msg}") from None
        if not isinstance(data, dict):
            raise UsageError(f"{path} holds no settings: not an object of names and values")
    try:
        # JSON is YAML but for tabs between its tokens.
        root = next(
            yaml.compose_all(text.replace("\t", " ") if path.suffix == ".json" else text, yaml.SafeLoader), None
        )
    except yaml.YAMLError as problem:
        mark = getattr(problem, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        raise UsageError(f"{path}{line}: not YAML: {getattr(problem, 'problem', None) or problem}") from None
    if root is None:
        return Config(path)
    if not isinstance(root, yaml.MappingNode):
        raise UsageError(f"{path} holds no settings: not a mapping of names to values")
    return Config(path, _table(root, shown(path), ()))


def _table(node: Any, file: str, path: tuple[str, ...]) -> Table:
    import yaml

    table = Table()
    for key_node, value_node in node.value:
        key = str(key_node.value)
        if key_node.tag == "tag:yaml.org,2002:merge":  # <<: *defaults
            for source in value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]:
                if isinstance(source, yaml.MappingNode):
                    table.entries = _table(source, file, path).entries | table.entries
            continue
        where = f"{file}:{key_node.start_mark.line + 1}"
        table.entries[key] = Value(_plain(value_node, file, (*path, key)), where, ".".join((*path, key)))
    return table


def _plain(node: Any, file: str, path: tuple[str, ...]) -> Any:
    import yaml

    if isinstance(node, yaml.MappingNode):
        return _table(node, file, path)
    if isinstance(node, yaml.SequenceNode):
        return tuple(Value(_plain(item, file, path)) for item in node.value)
    try:
        return yaml.constructor.SafeConstructor().construct_object(node)
    except (yaml.YAMLError, ValueError):
        return UNKNOWN  # a tag of the user's own: only their loader knows what it means


def read_command(path: Path) -> Command:
    """The line of a shell script that starts a Python script, with its flags."""
    text = text_of(path)
    for first_line, line in _whole_lines(text):
        try:
            words = shlex.split(
                line.replace('$(dirname "$0")', "$HERE").replace("$(dirname $0)", "$HERE"), comments=True
            )
        except ValueError:
            continue  # a quote that ends on another line: a message, not a command
        command = _command(words, path.parent, f"{shown(path)}:{first_line}")
        if command is not None:
            return command
    raise UsageError(f"{path} starts no Python script that is there; name the script itself")


def _whole_lines(text: str) -> list[tuple[int, str]]:
    """Lines with those joined that a backslash continues."""
    whole: list[tuple[int, str]] = []
    begun: tuple[int, str] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        start, before = begun or (number, "")
        if line.rstrip().endswith("\\"):
            begun = (start, before + line.rstrip()[:-1] + " ")
        else:
            whole.append((start, before + line))
            begun = None
    return whole


def _command(words: list[str], folder: Path, where: str) -> Command | None:
    starts = next(
        (i for i, w in enumerate(words) if re.match(r"(python[\d.]*|torchrun|accelerate|deepspeed)$", Path(w).name)),
        None,
    )
    if starts is None:
        return None
    for position in range(starts + 1, len(words)):
        script = _script(words, position, folder)
        if script is None:
            continue
        before = " ".join(words[starts:position])
        ranks = _RANKS.search(before)
        flags = tuple(w for w in words[position + 1 :] if not re.fullmatch(r"\$[@*]|\$\{@.*\}", w))
        return Command(
            script=script,
            flags=flags,
            where=where,
            launcher=next((name for name in _LAUNCHERS if name in before), None),
            ranks=int(ranks[1]) if ranks else None,
            known=True,
        )
    return None


def _script(words: list[str], position: int, folder: Path) -> Path | None:
    word = words[position].replace("$HERE", str(folder))
    if words[position - 1] == "-m":
        word = word.replace(".", "/") + ".py"
    if not word.endswith(".py"):
        return None
    return next((base / word for base in (Path(), folder, folder.parent) if (base / word).is_file()), None)
