"""Writes the tables of the guides from the definitions in flatout; a test checks that they are up to date.

    python docs/tables.py           write them
    python docs/tables.py --check   only say which guides are out of date (exit code 1)

A table stands between two comments, `<!-- table: changes -->` and `<!-- end of table -->`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from flatout.inside.patches import rows as patch_rows
from flatout.model.causes import CAUSES, cured_by
from flatout.model.changes import CHANGES
from flatout.model.formatting import GPU_READINGS, HOST_READINGS, Reading

DOCS = Path(__file__).resolve().parent
_TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def main() -> int:
    """Write or check every guide; the exit code is 1 where --check finds one out of date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, and say which are out of date")
    options = parser.parse_args()
    stale = [path for path in sorted(DOCS.glob("*.md")) if filled(path.read_text(encoding="utf-8")) != path.read_text()]
    for path in stale:
        print(f"{path.name} {'is out of date' if options.check else 'is written'}")
        if not options.check:
            path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
    return int(options.check and bool(stale))


def filled(text: str) -> str:
    """A guide with its tables as the definitions have them."""
    return _TABLE.sub(lambda match: f"{match[1]}{TABLES[match[2]]()}\n{match[3]}", text)


def changes() -> str:
    """Each change: its values, its class, what it does, when it gets in."""
    rows = [
        (f"`{spec.name}`", spec.does, spec.takes.words, spec.safety_in_words, spec.moment, "yes" if spec.live else "")
        for spec in CHANGES
    ]
    return _table(("change", "what it does", "value", "class", "gets in", "between two steps"), rows)


def settings() -> str:
    """What a change cures, and how a person writes it."""
    rows = []
    for spec in CHANGES:
        causes = ", ".join(f"[{cause.code}](TROUBLESHOOTING.md{cause.anchor})" for cause in cured_by(spec.name))
        rows.append((f"`{spec.name}`", causes, f"`{spec.code_to_write}`"))
    return _table(("change", "cures", "in your own code"), rows)


def causes() -> str:
    """Each cause, in words, and what cures it."""
    rows = []
    for cause in CAUSES:
        cures = ", ".join(f"`{name}`" for name in cause.changes)
        rows.append((f"[{cause.code}]({cause.anchor})", cause.because, cures))
    return _table(("cause", "the GPU loses time because", "changes that cure it"), rows)


def gpu_readings() -> str:
    """The figures of a GPU."""
    return _readings(GPU_READINGS)


def host_readings() -> str:
    """The figures of the machine."""
    return _readings(HOST_READINGS)


def patches() -> str:
    """What is replaced in a training process."""
    rows = [(f"`{replaced}`", when, why) for replaced, when, why in patch_rows()]
    return _table(("replaced", "in", "why"), rows)


def _readings(readings: Sequence[Reading]) -> str:
    places = ("over time", "summary", "csv", "run", "report")
    rows = [
        (f"`{reading.name}`", reading.label, *("•" if place in reading.shown else "" for place in places))
        for reading in readings
    ]
    heads = ("name", "label", "JSON of `top`", "summary of `top`", "CSV", "JSON of `run`", "report")
    return _table(heads, rows)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


TABLES: dict[str, Callable[[], str]] = {
    "changes": changes,
    "settings": settings,
    "causes": causes,
    "gpu_readings": gpu_readings,
    "host_readings": host_readings,
    "patches": patches,
}

if __name__ == "__main__":
    sys.exit(main())
