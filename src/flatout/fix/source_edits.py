"""What a fix kept → a FilePatch of the person's own files.

    a change ─► by a flag: the default of argparse, else the command line
             ├► by a key: the file it was read from
             ├► in the source: where the run says that it was made
             └► none of these: two lines at the start of the script, which apply the plan

A change is written whole, at all its places, or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from flatout.check.script import Script
from flatout.fix.edit_python import PythonText, is_loader, is_optimizer
from flatout.fix.edit_text import EditedText, SettingsText, Splice
from flatout.fix.offers import LOADED_BY_HAND
from flatout.fix.patch import FilePatch
from flatout.fix.result import Attempt, FixResult
from flatout.model.changes import BY_NAME, ChangeSpec, named
from flatout.model.errors import UsageError
from flatout.model.formatting import as_typed
from flatout.model.inputs import is_file
from flatout.model.plan import Change
from flatout.trace import RankTrace

_KINDS = {".py": PythonText, ".yaml": SettingsText, ".yml": SettingsText, ".json": SettingsText}
_UNKNOWN: Any = object()


def patch_of(result: FixResult, command: Sequence[str], plan_file: Path, diff_file: Path) -> FilePatch:
    """What a fix of this command kept; what cannot be edited is left to the plan in its file."""
    assert result.before is not None
    assert result.before.trace is not None
    editor = _Editor(command, result.before.trace.ranks[0])
    at_passes = [change.name for change in result.kept if change.name in named(moment="pass begins")]
    by_plan: list[Change] = []
    written: set[str] = set()
    for change in sorted(result.kept, key=lambda change: change.name != "loader"):
        # What else is made when a pass begins is made around PyTorch's loader.
        beside = change.name == "loader" and at_passes != ["loader"]
        decided = change.name in LOADED_BY_HAND and "loader" in written
        if decided or (not beside and editor.write(result.attempt_at(change))):
            written.add(change.name)
        else:
            by_plan.append(change)
    unwritten: list[Change] = []
    if by_plan and not editor.apply_plan(plan_file):
        by_plan, unwritten = [], by_plan
    return FilePatch(
        file=diff_file,
        files=editor.files(),
        command=tuple(editor.command),
        by_plan=tuple(by_plan),
        unwritten=tuple(unwritten),
    )


class _Editor:
    """The files of one training, as `rank` has recorded it."""

    def __init__(self, command: Sequence[str], rank: RankTrace) -> None:
        self.command = list(command)
        self._facts = rank.facts
        self._measured_s = rank.info.started_unix_s
        self._script = script_of(rank.info.command)
        self._texts: dict[Path, EditedText | None] = {}

    def files(self) -> dict[Path, tuple[bytes, bytes]]:
        """What is edited, from the current folder on: before and after."""
        edited = {path: text for path, text in self._texts.items() if text is not None}
        pairs = {path.relative_to(Path.cwd()): (text.before, text.after) for path, text in sorted(edited.items())}
        return {path: pair for path, pair in pairs.items() if pair[0] != pair[1]}

    def write(self, attempt: Attempt) -> bool:
        """Write a change; False where it cannot be told how."""
        change = attempt.change
        if change.knob.startswith("-"):
            return self._write_default(change) or self._write_flag(change)
        if change.knob:
            return self._write_key(change)
        spec, framework = BY_NAME[change.name], self._facts.training_loader.framework or ""
        if spec.as_code(change.value, framework) != spec.as_code(change.value):
            return False  # a framework makes the call
        if change.value in spec.behind_imports:
            script = self._python(self._script)
            return script is not None and _put([(script, script.set_switches(spec.as_code(change.value)))])
        places = [place.rpartition(":") for place in (attempt.where, *attempt.also)]
        return _put([self._in_source(file, line, spec, change.value) for file, _, line in places])

    def apply_plan(self, plan_file: Path) -> bool:
        """Have the script apply the plan; False where its file is not known."""
        script = self._python(self._script)
        if script is None:
            return False
        script.splices = tuple(one for one in script.splices if one.text.strip() != "import flatout")  # these lines do
        return script.put(script.apply_plan(str(plan_file)))

    def _in_source(
        self, file: str, line: str, spec: ChangeSpec, value: Any
    ) -> tuple[EditedText | None, list[Splice] | None]:
        text = self._python(file)
        if text is None or not line.isdigit():
            return None, None
        if spec.name == "loader":
            return text, text.use_flatout_loader(int(line))
        if spec.argument:
            is_meant = is_loader if spec.moment == "DataLoader()" else is_optimizer
            name, _, code = spec.argument.format(repr(value)).partition("=")
            return text, text.set_argument(int(line), is_meant, name, code)
        if (spec.name, value) == ("precision", "bf16"):
            return text, text.autocast(int(line), "cuda" if self._facts.on_gpu else "cpu")
        return None, None

    def _write_key(self, change: Change) -> bool:
        file, _, keys = change.knob.rpartition(":")
        text = self._text(file)
        if isinstance(text, PythonText):
            return _put([(text, text.set_setting(keys.split("."), change.value))])
        return isinstance(text, SettingsText) and _put([(text, text.set_value(keys.split("."), change.value))])

    def _write_default(self, change: Change) -> bool:
        """Where the value in force was the option's default."""
        in_force = _UNKNOWN
        for read in self._facts.settings:
            for name, option in read.options.items():
                if option == change.knob:
                    in_force = read.values.get(name, _UNKNOWN)
        if self._given_at(change.knob) is not None:
            return False
        edits = [(text, text.set_default(change.knob, in_force, change.value)) for text in self._modules()]
        edits = [edit for edit in edits if edit[1] is not None]
        return len(edits) == 1 and _put(edits)

    def _write_flag(self, change: Change) -> bool:
        """On the command line, if that names the script: a wrapper may drop what is added."""
        option, value, at = change.knob, as_typed(change.value), self._given_at(change.knob)
        if isinstance(change.value, bool):
            if not change.value or not any(text.is_switch(option) for text in self._modules()):
                return False
            value = ""
        if at is not None and "=" in self.command[at]:
            self.command[at] = f"{self.command[at].partition('=')[0]}={value}"
        elif at is not None and at + 1 < len(self.command):
            self.command[at + 1] = value
        elif at is None and script_of(self.command):
            self.command += filter(None, [option, value])
        else:
            return False
        return True

    def _given_at(self, option: str) -> int | None:
        """Where the command gives an option, in any of its spellings."""
        names = {option}.union(*(text.spellings(option) for text in self._modules()))
        return next((at for at, word in enumerate(self.command) if word.partition("=")[0] in names), None)

    def _modules(self) -> list[PythonText]:
        """The script and its own modules."""
        try:
            files = Script(Path(self._script)).files if self._script else []
        except UsageError:
            return []
        return [text for text in (self._python(str(file.path)) for file in files) if text is not None]

    def _python(self, file: str) -> PythonText | None:
        text = self._text(file)
        return text if isinstance(text, PythonText) else None

    def _text(self, file: str) -> EditedText | None:
        path = Path(os.path.normpath(Path.cwd() / file))
        if path not in self._texts:
            self._texts[path] = self._opened(path)
        return self._texts[path]

    def _opened(self, path: Path) -> EditedText | None:
        """A file of the person's in this folder, if it is what was measured; else None."""
        kind = _KINDS.get(path.suffix)
        if kind is None or not path.is_relative_to(Path.cwd()) or "-packages" in str(path) or path.is_symlink():
            return None
        try:
            return kind(path) if path.stat().st_mtime <= self._measured_s else None
        except (OSError, UsageError):
            return None


def _put(edits: Sequence[tuple[EditedText | None, list[Splice] | None]]) -> bool:
    """Make edits in several files, all of them or none."""
    before = [(text, text.splices) for text, _ in edits if text is not None]
    if all(text is not None and splices is not None and text.put(splices) for text, splices in edits):
        return True
    for text, splices in reversed(before):
        text.splices = splices
    return False


def script_of(command: Sequence[str]) -> str:
    """The Python file that a command names, by its path or behind -m; empty where there is none."""
    for before, word in pairwise(("", *command)):
        if word.endswith(".py") and is_file(Path(word)):
            return word
        if before == "-m":
            module = Path(*word.split("."))
            found = [path for path in (module.with_suffix(".py"), module / "__main__.py") if is_file(path)]
            if found:
                return str(found[0])
    return ""
