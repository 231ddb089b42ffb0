"""Settings that are known before a script runs: argparse defaults, a config file (YAML or JSON), flags.

A setting is known by its path (`train`, `amp`), and found by it however the script writes it:
`cfg.train.amp`, `config["train"]["amp"]` or `self.args.amp`.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from flatout.check.script import Node, Script, argument, last_name, where
from flatout.model.changes import pattern_of
from flatout.model.formatting import as_typed
from flatout.model.inputs import UNREAD, read_settings

# What people call the object that holds their settings.
HOLDER = re.compile(r"_*(args?|opts?|options|cfg|conf(ig)?s?|settings|flags|hparams|params)\d?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class KnownValue:
    """A value, `where` (file:line) it was written, and the `knob` that sets it: `--flag` or `key`."""

    what: Any = UNREAD
    where: str | None = None
    knob: str | None = None

    @property
    def known(self) -> bool:
        """Whether it can be told without running."""
        return self.what is not UNREAD

    def is_number(self) -> bool:
        """Whether it is known to be an int or a float."""
        return isinstance(self.what, int | float) and not isinstance(self.what, bool)

    def set_to(self, name: str, new: object) -> str:
        """What a person writes to change it, in the syntax of the place where it is set."""
        if self.knob is None:
            return f"{name}={new!r}"
        if not self.knob.startswith("-"):
            return f"{self.knob}: {as_typed(new)}"
        return self.knob if new is True else f"{self.knob} {new}"


Leaves = list[tuple[tuple[str, ...], KnownValue]]  # each setting with its path


class KnownSettings:
    """All settings that are known. A flag replaces a setting of its name, a config file what argparse declares."""

    def __init__(self, script: Script, flags: tuple[str, ...], config: Path | None) -> None:
        read = read_settings(config).items() if config is not None else ()
        in_config = [(path, KnownValue(what, f"{config}:{line}", ".".join(path))) for path, (what, line) in read]
        self.leaves: Leaves = _flags(script, flags)
        for layer in (in_config, _argparse_defaults(script)):
            stronger = {folded(leaf[-1]) for leaf, _ in self.leaves}
            self.leaves += [(leaf, value) for leaf, value in layer if folded(leaf[-1]) not in stronger]
        stores = [node for node in script.nodes if isinstance(getattr(node, "ctx", None), ast.Store)]
        self._changed = {folded(setting_path(node)[-1]) for node in stores if is_setting(node)}
        options = [name for names in _declared(script) for name in names]
        self.misspelt = dict(_misspelt(script, flags, options))  # flags, and what each was to be

    def at(self, path: Iterable[str]) -> KnownValue:
        """The setting at the end of a path; unknown where there is none, or several that disagree."""
        names = tuple(folded(name) for name in path)
        if not names or names[-1] in self._changed:
            return KnownValue()
        leaves = [(tuple(folded(name) for name in leaf), value) for leaf, value in self.leaves]
        exact = [value for leaf, value in leaves if leaf[-len(names) :] == names]
        fitting = exact or [value for leaf, value in leaves if leaf[-1] == names[-1]]
        agreed = len({repr(value.what) for value in fitting}) == 1
        return fitting[0] if agreed else KnownValue()

    def about(self, *subjects: str) -> list[tuple[str, KnownValue]]:
        """Every known setting about these, by any of the names people give them."""
        pattern = pattern_of(*subjects)
        names = dict.fromkeys(leaf[-1] for leaf, _ in self.leaves if pattern.fullmatch(leaf[-1].replace("-", "_")))
        return [(name, value) for name in names if (value := self.at([name])).known]


def folded(name: str) -> str:
    """A name without what people spell differently."""
    return re.sub(r"[-_ .]", "", name).lower()


def setting_path(node: Node) -> list[str]:
    """The names that lead to a setting: cfg.train["amp"] → cfg, train, amp. Empty for anything else."""
    match node:
        case ast.Name(id=name):
            return [name]
        case (
            ast.Attribute(value=holder, attr=name)
            | ast.Subscript(value=holder, slice=ast.Constant(value=str(name)))
            | ast.Call(func=ast.Attribute(value=holder, attr="get"), args=[ast.Constant(value=str(name)), *_])
            | ast.Call(func=ast.Name(id="getattr"), args=[holder, ast.Constant(value=str(name)), *_])
        ) if before := setting_path(holder):
            return [*before, name]
    return []


def is_setting(node: Node) -> bool:
    """Whether a node reads or sets an attribute of an object that holds settings."""
    return any(HOLDER.fullmatch(name) for name in setting_path(node)[:-1])


def _option_names(call: ast.Call) -> list[str]:
    """The names of an argument, the longest first: argparse stores it under that."""
    names = [one.value for one in call.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    if last_name(argument(call, "action")) == "BooleanOptionalAction":
        names += [f"--no-{name[2:]}" for name in names if name.startswith("--")]
    return sorted(names, key=len, reverse=True)


def _declared(script: Script) -> list[list[str]]:
    """The names of every argument that the script declares."""
    return [_option_names(call) for call in script.calls("add_argument")]


def _argparse_defaults(script: Script) -> Leaves:
    """Every declared argument with its default; a default of None is as good as unknown."""
    found: Leaves = []
    for call in script.calls("add_argument"):
        action, default = argument(call, "action"), argument(call, "default")
        what = {"store_true": False, "store_false": True}.get(getattr(action, "value", ""), UNREAD)
        if isinstance(default, ast.Constant) and default.value is not None:
            is_text = last_name(argument(call, "type")) in ("", "str")
            what = default.value if is_text or not isinstance(default.value, str) else UNREAD
        for option in _option_names(call)[:1]:
            found.append(((option.lstrip("-"),), KnownValue(what, where(call), option)))
    return found


def _flags(script: Script, flags: tuple[str, ...]) -> Leaves:
    """The flags given on the command line, a short or shortened one by its long name."""
    long = {name: names[0] for names in _declared(script) for name in names}
    found: Leaves = []
    for word, following in pairwise((*flags, "--")):
        name, equals, text = word.partition("=")
        if name.startswith("-"):
            alone = not equals and following.startswith("--")
            what = True if alone else _as_data(text or following)
            meant = _completed(name, long)
            found.append(((long.get(meant, meant).lstrip("-"),), KnownValue(what, "the command line", name)))
    return found


def _completed(name: str, options: Iterable[str]) -> str:
    """A flag as argparse completes it: to the one option that begins so."""
    fitting = [option for option in options if name.startswith("--") and option.startswith(name)]
    return fitting[0] if len(fitting) == 1 else name


def _misspelt(script: Script, flags: tuple[str, ...], options: list[str]) -> Iterator[tuple[str, str]]:
    """Flags that argparse would refuse, each with the option that it resembles.

    One that resembles none may be declared where the script alone does not show it.
    """
    if not script.calls("parse_args") or script.calls("parse_known_args"):
        return
    for word in flags:
        name = word.partition("=")[0]
        close = difflib.get_close_matches(name, options, n=1, cutoff=0.8)
        if name.startswith("--") and close and not any(option.startswith(name) for option in options):
            yield name, close[0]


def _as_data(text: str) -> Any:
    """A word of a command line as the value it stands for."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return {"true": True, "false": False}.get(text.lower(), text)
