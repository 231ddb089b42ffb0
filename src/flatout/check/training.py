"""What is known of one training before it runs: its settings, its loader, its loops, and the machine.

Known values are literals, settings, `os.cpu_count()`, and names bound once in their file to one of
these. Settings are argparse defaults, a config file (YAML or JSON) and flags, each found by its path
(`train`, `amp`) however the script writes it: `cfg.train.amp`, `config["train"]["amp"]`,
`self.args.amp`. Everything else is unknown, and no check guesses.
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

from flatout.check.script import Node, Script, argument, evaluates, find_loops, last_name, only_value, parents, where
from flatout.model.changes import pattern_of
from flatout.model.formatting import as_typed
from flatout.model.frameworks import FRAMEWORKS, RUN_LOOPS
from flatout.model.inputs import UNREAD, read_settings
from flatout.sample.budget import Budget
from flatout.trace import GpuSample

Gpus = tuple[GpuSample, ...] | None  # None where no driver answers
# What people call the object that holds their settings.
_HOLDER = re.compile(r"_*(args?|opts?|options|cfg|conf(ig)?s?|settings|flags|hparams|params)\d?", re.IGNORECASE)
# The options of a DataLoader that matter here: place and default.
_OPTIONS: dict[str, tuple[int | None, object]] = {
    "batch_size": (1, 1),
    "num_workers": (5, 0),
    "pin_memory": (7, False),
    "prefetch_factor": (None, None),
    "persistent_workers": (None, False),
}
# Classes of frameworks whose arguments configure the loader, each with its names and defaults for
# these options.
_CONFIGURES_LOADER = {
    name: framework.loader_arguments
    for framework in FRAMEWORKS
    if framework.loader_arguments
    for name in framework.precision
}


@dataclass(frozen=True, slots=True)
class KnownValue:
    """A value, where (file:line) it was written, and the knob that sets it: `--flag` or `key`.

    `path` ends in the name of the setting, or of the argument that gets the value.
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
        """The same value for an argument of this name."""
        return replace(self, path=(name,))

    def set_to(self, new: object) -> str:
        """What a person writes to change it, in the syntax of the place where it is set."""
        if self.knob is None:
            return f"{self.name}={new!r}"
        if not self.knob.startswith("-"):
            return f"{self.knob}: {as_typed(new)}"
        return self.knob if new is True else f"{self.knob} {new}"


UNKNOWN = KnownValue()


class Training:
    """One training before it starts. Without a script, only its config and the machine are known."""

    def __init__(
        self, budget: Budget, gpus: Gpus, path: Path | None, flags: tuple[str, ...] = (), config: Path | None = None
    ) -> None:
        self.budget, self.gpus, self.path, self.config = budget, gpus, path, config
        self.script = Script(path)
        self.settings = KnownSettings(self.script, flags, config)
        self.loops = find_loops(self.script)
        self.has_epochs = any(self.loops.values())
        # Whether all of the training was read: its loop, every module of its own, and no framework around it.
        unread = self.script.not_read or self.script.packages.intersection(RUN_LOOPS)
        self.is_complete = bool(self.loops) and not unread
        loaders = self.script.calls("DataLoader", "StatefulDataLoader")
        self.loader = next((call for call in loaders if len(loaders) == 1 or not evaluates(call)), None)
        self._configuring = None if loaders else next(iter(self.script.calls(*_CONFIGURES_LOADER)), None)

    def option(self, name: str) -> KnownValue:
        """An option of the training's loader, or of what configures it; without either, a setting of
        the name."""
        call, (position, default) = self.loader, _OPTIONS[name]
        if self._configuring is not None:
            call, position = self._configuring, None
            name, default = _CONFIGURES_LOADER[last_name(call.func)][name]
        if call is None:
            return self.setting(name).named(name)
        value = self.argument(call, name, position) or KnownValue(default, path=(name,))
        return value if value.where else replace(value, where=where(call))

    def setting(self, subject: str) -> KnownValue:
        """A setting by any of the names people give it."""
        return next(iter(self.settings.about(subject)), UNKNOWN)

    def argument(self, call: ast.Call, name: str, position: int | None = None) -> KnownValue | None:
        """What a call is given under a name; None where it is not given, unknown where that cannot be
        told."""
        node = argument(call, name, position)
        spread = [keyword.value for keyword in call.keywords if keyword.arg is None]
        for mapping in spread if node is None else ():
            items = _items(mapping)
            if items is None:
                return UNKNOWN
            node = items.get(name)
        return self.value(node).named(name) if node is not None else None

    def switched_off(self, node: Node) -> KnownValue | None:
        """The setting that a node stands under and that is off: `if args.use_amp:`, or a variable
        that a flag sets."""
        below = node
        for above in parents(node):
            if isinstance(above, ast.If) and below in above.body:
                name = setting_path(above.test)
                value = self.settings.at(name) if len(name) == 1 else self.value(above.test)
                if value.what is False:
                    return value
            below = above
        return None

    def value(self, node: Node, *, follow: bool = True) -> KnownValue:
        """What an expression is worth; a name is followed one step."""
        match node:
            case ast.Constant(value=what):
                return KnownValue(what, where(node))
            case ast.BoolOp(op=ast.And(), values=[first, *_]) | ast.IfExp(body=first, orelse=ast.Constant(value=None)):
                return self.value(first)  # of `cfg.pin_memory and on_gpu`: a GPU is expected
            case ast.Call() if last_name(node.func) == "cpu_count":
                return KnownValue(self.budget.cores_of_machine, where(node))
            case ast.Name() if follow and (assigned := only_value(node)):
                return self.value(assigned, follow=False)
        path = setting_path(node)
        holder = next((place for place, name in enumerate(path) if _HOLDER.fullmatch(name)), len(path))
        return self.settings.at(path[holder + 1 :])


def _items(node: Node) -> dict[str, Node] | None:
    """The items of a dict display, or of a name bound once to one that nothing adds to."""
    if isinstance(node, ast.Name):
        uses = [one for one in node.file.nodes if isinstance(one, ast.Name) and one.id == node.id]  # type: ignore[attr-defined]
        changed = any(isinstance(use.around, ast.Subscript | ast.Attribute) for use in uses)  # type: ignore[attr-defined]
        node = None if changed else only_value(node)
    if not isinstance(node, ast.Dict) or not all(isinstance(key, ast.Constant) for key in node.keys):
        return None
    return {str(getattr(key, "value", "")): value for key, value in zip(node.keys, node.values, strict=True)}


# ------------------------------------------------------------ settings


class KnownSettings:
    """All settings that are known. A flag replaces a setting of its name, a config file what argparse
    declares."""

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
            return UNKNOWN
        of_name = [setting for setting in self._settings if folded(setting.name) == names[-1]]
        exact = [setting for setting in of_name if [*map(folded, setting.path)][-len(names) :] == names]
        fitting = exact or of_name
        return fitting[0] if len({repr(setting.what) for setting in fitting}) == 1 else UNKNOWN

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
    return any(_HOLDER.fullmatch(name) for name in setting_path(node)[:-1])


def _in_config(path: Path | None) -> list[KnownValue]:
    read = read_settings(path) if path is not None else {}
    return [KnownValue(what, f"{path}:{line}", ".".join(keys), keys) for keys, (what, line) in read.items()]


class _Options:
    def __init__(self, script: Script) -> None:
        self.defaults: list[KnownValue] = []
        self._long: dict[str, str] = {}  # argparse stores an option under the longest of its names
        self._off: dict[str, str] = {}  # of --no-pin: --pin
        for call in script.calls("add_argument"):
            texts = [one.value for one in call.args if isinstance(one, ast.Constant)]
            names = sorted((text for text in texts if isinstance(text, str)), key=len, reverse=True)
            for longest in names[:1]:
                self.defaults.append(KnownValue(_default(call), where(call), longest, (longest.lstrip("-"),)))
                self._long |= dict.fromkeys(names, longest)
            if last_name(argument(call, "action")) == "BooleanOptionalAction":
                self._off |= {f"--no-{name[2:]}": names[0] for name in names if name.startswith("--")}

    def given(self, flags: tuple[str, ...]) -> list[KnownValue]:
        """What flags on the command line say; argparse completes one that begins like a single option."""
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
        """Flags that argparse would refuse, each with the option it resembles; others may be declared
        elsewhere."""
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
