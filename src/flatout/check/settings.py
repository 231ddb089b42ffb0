"""Settings that stand outside the code: config files (YAML, JSON), and the command that starts the training.

A setting is known by its path (`train`, `amp`) and is looked up by it, however the script carries it about: as
`cfg.train.amp`, `config["train"]["amp"]` or `self.args.amp`. A shell script is searched for the line that starts one.
"""

from __future__ import annotations

import ast
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flatout.check.values import UNKNOWN, Value, merged
from flatout.model.errors import UsageError
from flatout.model.inputs import first_yaml_node, is_file, load_json, text_of
from flatout.model.setting_aliases import pattern_of

Leaves = list[tuple[tuple[str, ...], Value]]

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
class Settings:
    """Every setting that is known of, by its path; `changed` are the names that the script itself sets anew."""

    leaves: Leaves = field(default_factory=list)
    changed: set[str] = field(default_factory=set)
    config: Path | None = None

    def of(self, path: tuple[str, ...]) -> Value | None:
        """The setting at the end of a path; unknown where several fit and disagree, None where there is none."""
        wanted = tuple(folded(name) for name in path)
        if wanted[-1] in self.changed:
            return Value()
        fitting = [(tuple(folded(name) for name in leaf), value) for leaf, value in self.leaves]
        exactly = [value for leaf, value in fitting if leaf[-len(wanted) :] == wanted]
        found = exactly or [value for leaf, value in fitting if leaf[-1] == wanted[-1]]
        return merged(found) if found else None

    def named(self, *subjects: str) -> list[tuple[str, Value]]:
        """Every known setting about these, by any of the names people give them."""
        pattern = pattern_of(*subjects)
        names = dict.fromkeys(leaf[-1] for leaf, _ in self.leaves if pattern.fullmatch(leaf[-1].replace("-", "_")))
        found = [(name, self.of((name,))) for name in names]
        return [(name, value) for name, value in found if value is not None and value.known]

    def given(self, command: Command) -> None:
        """Let the flags of the command have the last word, where a flag is called like a setting."""
        for position, (leaf, value) in enumerate(self.leaves):
            name = leaf[-1].lower()
            flag = f"--{name.replace('_', '-')}"
            text = command.flag(f"--{name}", f"--{leaf[-1]}", flag)
            if text is not None and value.where != command.where:
                what = text if isinstance(text, bool) else as_data(text, is_text=isinstance(value.what, str))
                self.leaves[position] = (leaf, Value(what, command.where, flag))


def folded(name: str) -> str:
    """A name without what people spell differently."""
    return re.sub(r"[-_ .]", "", name).lower()


def as_data(text: str, *, is_text: bool = False) -> Any:
    """A word of a command line as the value it stands for."""
    if "$" in text:
        return UNKNOWN
    try:
        return text if is_text else ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return {"true": True, "false": False}.get(text.lower(), text)


def shown(path: Path) -> str:
    """A path as short as it can be said from here."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def read_data(path: Path) -> Leaves:
    """The settings in a YAML or JSON file, each with its line."""
    import yaml

    text = text_of(path)
    if path.suffix == ".json":
        load_json(text, str(path))
        text = text.replace("\t", " ")  # JSON is YAML but for tabs between its tokens
    root = first_yaml_node(text, str(path))
    if root is not None and not isinstance(root, yaml.MappingNode):
        raise UsageError(f"{path} holds no settings: not a mapping of names to values")
    return list(_leaves(root, shown(path), ()).items()) if root is not None else []


def _leaves(mapping: Any, file: str, above: tuple[str, ...]) -> dict[tuple[str, ...], Value]:
    import yaml

    found: dict[tuple[str, ...], Value] = {}
    for key, node in mapping.value:
        if key.tag == "tag:yaml.org,2002:merge":  # <<: *defaults
            for source in node.value if isinstance(node, yaml.SequenceNode) else [node]:
                if isinstance(source, yaml.MappingNode):  # else their loader will refuse it
                    found = _leaves(source, file, above) | found
            continue
        path = (*above, str(key.value))
        if isinstance(node, yaml.MappingNode):
            found |= _leaves(node, file, path)
            continue
        try:
            what = yaml.constructor.SafeConstructor().construct_object(node, deep=True)
        except Exception:  # a tag of the user's own, or a date that is none: only their loader knows what it means
            what = UNKNOWN
        found[path] = Value(what, f"{file}:{key.start_mark.line + 1}", ".".join(path))
    return found


def read_command(path: Path) -> Command:
    """The line of a shell script that starts a Python script, with its flags."""
    text = text_of(path)
    for found in re.finditer(r"(?:.*\\\n)*.*", text):  # with those lines that a backslash continues
        line = re.sub(r'\$\(dirname "?\$0"?\)', "$HERE", found[0].replace("\\\n", " "))
        where = f"{shown(path)}:{text.count(chr(10), 0, found.start()) + 1}"
        try:
            command = _command(shlex.split(line, comments=True), path.parent, where)
        except ValueError:
            continue  # a quote that ends on another line: a message, not a command
        if command is not None:
            return command
    raise UsageError(f"{path} starts no Python script that is there; name the script itself")


def _command(words: list[str], folder: Path, where: str) -> Command | None:
    starters = r"(python[\d.]*|torchrun|accelerate|deepspeed)$"
    starts = next((at for at, word in enumerate(words) if re.match(starters, Path(word).name)), len(words))
    for position in range(starts + 1, len(words)):
        script = _script(words, position, folder)
        if script is None:
            continue
        before = " ".join(words[starts:position])
        ranks = _RANKS.search(before)
        return Command(
            script=script,
            flags=tuple(word for word in words[position + 1 :] if not re.fullmatch(r"\$[@*]|\$\{@.*\}", word)),
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
    return next((base / word for base in (Path(), folder, folder.parent) if is_file(base / word)), None)
