"""Numbers → coloured characters. Pure: values and a width in, rich Text out.

Nothing depends on colour alone: what is full is drawn with █, what is only claimed with ░, so that NO_COLOR and
colour-blind eyes see the same picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_PARTS = " ▏▎▍▌▋▊▉█"


@dataclass(frozen=True, slots=True, kw_only=True)
class Palette:
    """Colours by what they mean."""

    name: str
    ground: str
    panel: str
    text: str
    bold: str
    dim: str
    track: str
    work: str
    claim: str
    cool: str
    warm: str
    hot: str


DARK = Palette(
    name="flatout-dark", ground="#0d1117", panel="#161b22", text="#c9d1d9", bold="#e6edf3", dim="#8b949e",
    track="#30363d", work="#4ade80", claim="#b7791f", cool="#60a5fa", warm="#fbbf24", hot="#f87171",
)  # fmt: skip
LIGHT = Palette(
    name="flatout-light", ground="#ffffff", panel="#eaeef2", text="#1f2328", bold="#1f2328", dim="#57606a",
    track="#d0d7de", work="#15803d", claim="#b45309", cool="#1d4ed8", warm="#b45309", hot="#b91c1c",
)  # fmt: skip


def bar(pct: float | None, width: int, colour: str, palette: Palette) -> Text:
    """A horizontal bar, exact to an eighth of a character."""
    full, part = divmod(round(_clip(pct) / 100 * max(0, width) * 8), 8)
    text = Text("█" * full + (_PARTS[part] if part else ""), style=colour)
    return text.append("·" * (width - full - bool(part)), style=palette.track)


def sparkline(values: Sequence[float | None], width: int, colour: str) -> Text:
    """The last values in one line, the newest at the right."""
    shown = values[-width:] if width > 0 else ()
    marks = "".join(" " if value is None else _EIGHTHS[max(1, round(_clip(value) / 100 * 8))] for value in shown)
    return Text(marks.rjust(width), style=colour)


def chart(
    work: Sequence[float | None], claim: Sequence[float | None], width: int, height: int, palette: Palette
) -> list[Text]:
    """Work as a solid area; above it, hatched, what GPU-Util claims beyond it. The newest at the right."""
    columns = max(0, width - 5)
    padding = columns - min(columns, len(work))
    pairs = list(zip(work, claim, strict=True))[-columns:] if columns else []
    lines = []
    for row in range(height):
        line = Text(f"{_axis(row, height):>4} ", style=palette.dim)
        line.append(" " * padding)
        floor_pct, step_pct = 100 * (height - 1 - row) / height, 100 / height
        for worked, claimed in pairs:
            line.append(*_cell(worked, claimed, floor_pct, step_pct, palette))
        lines.append(line)
    return lines


def cores(pcts: Sequence[float], width: int, height: int, palette: Palette) -> list[Text]:
    """Every core: bars side by side where they fit with their numbers, else one column of characters a core."""
    grid = _core_grid(pcts, width, height, palette)
    if grid is not None:
        return grid
    spaced = 2 if len(pcts) * 2 <= width else 1
    a_line = max(1, width // spaced)
    rows = [pcts[at : at + a_line] for at in range(0, len(pcts), a_line)]
    tall = max(1, height // len(rows))
    lines: list[Text] = []
    for row in rows[:height]:
        for level in range(tall):
            line = Text()
            for pct in row:
                eighths = round(_clip(pct) / 100 * tall * 8) - 8 * (tall - 1 - level)
                is_floor = level == tall - 1
                mark = _EIGHTHS[min(8, max(1 if is_floor else 0, eighths))]
                line.append(mark.ljust(spaced), style=heat(pct, palette) if eighths > 0 else palette.track)
            lines.append(line)
    return lines


def heat(pct: float | None, palette: Palette) -> str:
    """Cool, warm from 75, hot from 90."""
    return palette.hot if _clip(pct) >= 90 else palette.warm if _clip(pct) >= 75 else palette.cool


def _core_grid(pcts: Sequence[float], width: int, height: int, palette: Palette) -> list[Text] | None:
    columns = max(1, width // 20)
    rows = -(-len(pcts) // columns)
    if rows > height:
        return None
    columns = -(-len(pcts) // rows)
    cell = width // columns
    lines = []
    for row in range(rows):
        line = Text()
        for index in range(row, len(pcts), rows):
            line.append(f"{index:>3} ", style=palette.dim)
            line.append_text(bar(pcts[index], cell - 10, heat(pcts[index], palette), palette))
            line.append(f"{pcts[index]:>4.0f}% ")
        lines.append(line)
    return lines


def _cell(
    work: float | None, claim: float | None, floor_pct: float, step_pct: float, palette: Palette
) -> tuple[str, str]:
    eighths = round((_clip(work) - floor_pct) / step_pct * 8)
    if eighths > 0:
        return _EIGHTHS[min(8, eighths)], palette.work
    if _clip(claim) >= floor_pct + step_pct / 2:
        return "░", palette.claim
    return " ", ""


def _axis(row: int, height: int) -> str:
    if row == 0:
        return "100%"
    if row == height - 1:
        return "0%"
    return "50%" if height >= 5 and row == height // 2 else ""


def _clip(pct: float | None) -> float:
    return min(100.0, max(0.0, pct or 0.0))
