"""`flatout skill`."""

from __future__ import annotations

from pathlib import Path

from flatout.cli.entry import verb


@verb()
def skill() -> None:
    """Print a SKILL.md that tells a coding agent how to work with flatout: `flatout skill > SKILL.md`."""
    print((Path(__file__).parents[1] / "SKILL.md").read_text(encoding="utf-8"), end="")
