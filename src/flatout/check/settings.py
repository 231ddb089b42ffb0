"""Settings that are known before a script runs: argparse defaults, a config file (YAML or JSON), flags.

A setting is known by its path (`train`, `amp`), and found by it however the script writes it:
`cfg.train.amp`, `config["train"]["amp"]` or `self.args.amp`.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    """A value, where (file:line) it was written, and the knob that sets it: `--flag` or `key`.

    `path` ends in the name of the setting, or of the argument that it is given to.
    """

    what: Any = UNREAD
    where: str | None = None
    knob: str | None = None
    path: tuple[str, ...] = ("",)

    @property
    def name(self) -> str:
        """The last name of its path."""
        return self.path[-1]

    @property
    def known(self) -> bool:
        """Whether it can be told without running."""
        return self.what is not UNREAD

    def is_number(self) -> bool:
        """Whether it is known to be an int or a float."""
        return isinstance(self.what, int | float) and not isinstance(self.what, bool)

    def named(self, name: str) -> KnownValue:
        """The same value, given to an argument of this name."""
        return replace(self, path=(name,))

    def set_to(self, new: object) -> str:
        """What a person writes to change it, in the syntax of the place where it is set."""
        if self.knob is None:
            return f"{self.name}={new!r}"
        if not self.knob.startswith("-"):
            return f"{self.knob}: {as_typed(new)}"
        return self.knob if new is True else f"{self.knob} {new}"


class KnownSettings:
    """All settings that are known. A flag replaces a setting of its name, a config file what argparse declares."""

    def __init__(self, script: Script, flags: tuple[str, ...], config: Path | None) -> None:
        options = _Options(script)
        self._settings: list[KnownValue] = []
        for layer in (options.given(flags), _in_config(config), options.defaults):
            stronger = {folded(setting.name) for setting in self._settings}
            self._settings += [setting for setting in layer if folded(setting.name) not in stronger]
        stores = [node for node in script.nodes if isinstance(getattr(node, "ctx", None), ast.Store)]
        self._changed = {folded(setting_path(node)[-1]) for node in stores if is_setting(node)}
        self.misspelt = options.misspelt(script, flags)

    def at(self, path: Sequence[str]) -> KnownValue:
        """The setting at the end of a path; unknown where there is none, or several that disagree."""
        names = [folded(name) for name in path]
        if not names or names[-1] in self._changed:
            return KnownValue()
        of_name = [setting for setting in self._settings if folded(setting.name) == names[-1]]
        exact = [setting for setting in of_name if [*map(folded, setting.path)][-len(names) :] == names]
        fitting = exact or of_name
        agreed = len({repr(setting.what) for setting in fitting}) == 1
        return fitting[0] if agreed else KnownValue()

    def about(self, *subjects: str) -> list[KnownValue]:
        """Every known setting about these, by any of the names people give them."""
        pattern = pattern_of(*subjects)
        names = dict.fromkeys(setting.name for setting in self._settings)
        found = [self.at([name]) for name in names if pattern.fullmatch(name.replace("-", "_"))]
        return [setting for setting in found if setting.known]


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


def _in_config(path: Path | None) -> list[KnownValue]:
    read = read_settings(path) if path is not None else {}
    return [KnownValue(what, f"{path}:{line}", ".".join(keys), keys) for keys, (what, line) in read.items()]


class _Options:
    """The options that a script declares with argparse, each by its longest name."""

    def __init__(self, script: Script) -> None:
        self.defaults: list[KnownValue] = []
        self._long: dict[str, str] = {}  # the longest name of each name
        self._off: dict[str, str] = {}  # of --no-pin: --pin
        for call in script.calls("add_argument"):
            texts = [one.value for one in call.args if isinstance(one, ast.Constant)]
            names = sorted((text for text in texts if isinstance(text, str)), key=len, reverse=True)
            for longest in names[:1]:
                self.defaults.append(KnownValue(_default(call), where(call), longest, (longest.lstrip("-"),)))
            self._long |= dict.fromkeys(names, names[0])
            if last_name(argument(call, "action")) == "BooleanOptionalAction":
                self._off |= {f"--no-{name[2:]}": names[0] for name in names if name.startswith("--")}

    def given(self, flags: tuple[str, ...]) -> list[KnownValue]:
        """What flags on the command line say, whether they are short, shortened or whole."""
        found = []
        for word, following in pairwise((*flags, "--")):
            name, equals, text = word.partition("=")
            if not name.startswith("-"):
                continue
            what = True if not equals and following.startswith("--") else _as_data(text or following)
            if name in self._off:
                name, what = self._off[name], False
            completed = [option for option in self._long if name.startswith("--") and option.startswith(name)]
            meant = completed[0] if len(completed) == 1 else name
            found.append(KnownValue(what, "the command line", name, (self._long.get(meant, meant).lstrip("-"),)))
        return found

    def misspelt(self, script: Script, flags: tuple[str, ...]) -> dict[str, str]:
        """Flags that argparse would refuse, each with the option that it resembles.

        One that resembles none may be declared where the script alone does not show it.
        """
        found: dict[str, str] = {}
        options = [*self._long, *self._off]
        takes_others = not script.calls("parse_args") or script.calls("parse_known_args")
        for word in flags if not takes_others else ():
            name = word.partition("=")[0]
            close = difflib.get_close_matches(name, options, n=1, cutoff=0.8)
            if name.startswith("--") and close and not any(option.startswith(name) for option in options):
                found[name] = close[0]
        return found


def _default(call: ast.Call) -> Any:
    """The default of an option; one of None is as good as unknown."""
    action, default = argument(call, "action"), argument(call, "default")
    if isinstance(default, ast.Constant) and default.value is not None:
        is_text = last_name(argument(call, "type")) in ("", "str")
        return default.value if is_text or not isinstance(default.value, str) else UNREAD
    return {"store_true": False, "store_false": True}.get(getattr(action, "value", ""), UNREAD)


def _as_data(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return {"true": True, "false": False}.get(text.lower(), text)
