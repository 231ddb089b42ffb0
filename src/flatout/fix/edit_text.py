"""A file being edited: pieces of its text are replaced, and everything else stays byte for byte."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flatout.model.errors import UsageError
from flatout.model.inputs import MOST_BYTES

_LINE_END = re.compile(r"\r\n|\r|\n")
_MARK = "\ufeff"  # some editors begin a file with it


class Splice(NamedTuple):
    """A piece of a text, and what to put in its place."""

    start: int
    end: int
    text: str


class EditedText:
    """A text file and what is to be replaced in it. Raises UsageError where it is no text in UTF-8."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.before = path.read_bytes()
        try:
            self.text = self.before.decode()
        except UnicodeDecodeError:
            raise UsageError(f"{path} is not text in UTF-8") from None
        if len(self.before) > MOST_BYTES:
            raise UsageError(f"{path} is too large to be edited")
        self.splices: tuple[Splice, ...] = ()
        ends = [*_LINE_END.finditer(self.text)]
        self.newline = ends[0][0] if ends else "\n"
        self._lines = [int(self.text.startswith(_MARK)), *(end.end() for end in ends)]

    @property
    def after(self) -> bytes:
        """The file with everything replaced."""
        return _spliced(self.text, self.splices).encode()

    def put(self, splices: Iterable[Splice]) -> bool:
        """Replace pieces. Refused where that was done otherwise already, or the result is no longer sound."""
        new = [one for one in splices if one not in self.splices]
        if any(one.start < other.end and other.start < one.end for one in new for other in self.splices):
            return False
        if not self._is_sound(_spliced(self.text, (*self.splices, *new))):
            return False
        self.splices += tuple(new)
        return True

    def offset(self, line: int, column: int = 0) -> int:
        """Where a line, counted from 1, has its so manieth byte."""
        start = self._lines[line - 1]
        return start + len(self.text[start:].encode()[:column].decode()) if column else start

    def _is_sound(self, text: str) -> bool:
        """Whether a text is still what the file is."""
        return True


def _spliced(text: str, splices: Iterable[Splice]) -> str:
    """What is put in at the same place stays in its order."""
    pieces, done = [], 0
    for splice in sorted(splices, key=lambda one: (one.start, one.end)):
        pieces += [text[done : splice.start], splice.text]
        done = splice.end
    return "".join([*pieces, text[done:]])


class SettingsText(EditedText):
    """A file of settings in YAML or JSON."""

    def set_value(self, keys: Sequence[str], value: Any) -> list[Splice] | None:
        """Put a value under these keys. None where it would change elsewhere too, or is not on a line."""
        import yaml

        try:
            # JSON is YAML but for tabs between its tokens.
            root = yaml.compose(self.text.replace("\t", " "), Loader=yaml.SafeLoader)
        except (yaml.YAMLError, RecursionError):
            return None
        repeated = _repeated(root)
        node = root
        for key in keys:
            node = _under(node, key)
            if node is None or id(node) in repeated:
                return None
        start, end = node.start_mark.index, node.end_mark.index
        if node.id != "scalar" or start == end or self.text[start] in "&!|>":
            return None
        written = json.dumps(value)
        if self.path.suffix != ".json":
            written = yaml.safe_dump(value, width=MOST_BYTES).removesuffix("...\n").strip()
        return [Splice(start, end, written)] if "\n" not in written else None


def _under(node: Any, key: str) -> Any:
    """What stands under a key, of which the last one counts, or at a number."""
    if node.id == "mapping":
        return next((held for name, held in reversed(node.value) if name.value == key), None)
    if node.id == "sequence" and key.isdigit() and int(key) < len(node.value):
        return node.value[int(key)]
    return None


def _repeated(root: Any) -> set[int]:
    """The nodes that an alias repeats elsewhere."""
    seen: set[int] = set()
    repeated: set[int] = set()
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            repeated.add(id(node))
            continue
        seen.add(id(node))
        if node is not None and node.id == "mapping":
            waiting += [held for _, held in node.value]
        elif node is not None and node.id == "sequence":
            waiting += node.value
    return repeated
