"""The guide docs/TROUBLESHOOTING.md, which comes with the package, entry by entry: for `flatout explain`.

An entry is Markdown without the links, which lead nowhere in a terminal.
"""

from __future__ import annotations

import re
from pathlib import Path

from flatout.model.causes import BY_CODE, CAUSES, CODES, cured_by
from flatout.model.changes import BY_NAME, ChangeSpec
from flatout.model.errors import UsageError
from flatout.model.inputs import did_you_mean

GUIDE = (Path(__file__).parents[1] / "TROUBLESHOOTING.md").resolve()
_ALL_CAUSES = "the causes"  # the section that lists them
_LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")


def explain(name: str) -> str:
    """What a cause or a symptom is, how to make sure and what to do; or what a change does."""
    entries = _entries()
    name = name.strip().lower()
    if name in entries:
        return entries[name] + _cures(name)
    change = BY_NAME.get(name.replace("-", "_"))
    if change is None:
        raise UsageError(f"nothing is called {name}: {did_you_mean(name, [*entries, *BY_NAME])}")
    return _of_change(change)


def overview() -> str:
    """Everything that has an entry."""
    causes = "\n".join(f"- `{cause.code}`: {cause.because}" for cause in CAUSES)
    symptoms = ", ".join(name for name in _entries() if name not in BY_CODE)
    changes = ", ".join(f"`{name}`" for name in BY_NAME)
    return f"The GPU loses time because\n\n{causes}\n\nSymptoms: {symptoms}.\n\nChanges: {changes}.\n"


def _entries() -> dict[str, str]:
    """Causes by their code, in the guide's order, and symptoms by their heading."""
    sections = re.split(r"^#{2,3} ", _LINK.sub(r"\1", GUIDE.read_text(encoding="utf-8")), flags=re.MULTILINE)
    entries = {}
    for section in sections[1:]:
        title, _, text = section.partition("\n")
        entries[title.lower()] = f"### {title}\n\n{text.strip()}\n"
    del entries[_ALL_CAUSES]
    return entries


def _cures(code: str) -> str:
    """A line with the changes that cure a cause; empty where there are none."""
    changes = BY_CODE[code].changes if code in CODES else ()
    return f"- **Changes that cure it**: {', '.join(f'`{name}`' for name in changes)}.\n" if changes else ""


def _of_change(change: ChangeSpec) -> str:
    lines = [
        f"### {change.name}\n\n{change.does}",
        f"- **Value**: {change.takes.words}.",
        f"- **What it does to the result**: {change.safety_in_words}.",
        f"- **In your own code**: `{change.code_to_write}`.",
    ]
    causes = ", ".join(f"`{cause.code}`" for cause in cured_by(change.name))
    if causes:
        lines.append(f"- **Cures**: {causes}.")
    return "\n".join(lines).replace("\n- ", "\n\n- ", 1) + "\n"
