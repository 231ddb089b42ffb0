"""HTML from Python. Text is escaped unless it is already Html, so nothing in a trace can become markup."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

MAX_TEXT = 200


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """An element. `class_` is class, `aria_label` aria-label. What is None is left out."""
    opening = name
    for key, value in attributes.items():
        if value is not None:
            opening += f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
    if name == "meta":
        return Html(f"<{opening}>")
    return Html(f"<{opening}>{join(children)}</{name}>")


def join(children: Iterable[object]) -> Html:
    """One after the other; None is left out."""
    return Html("".join(_markup(child) for child in children if child is not None))


def _markup(child: object) -> str:
    return child if isinstance(child, Html) else escape(str(child))


def table(caption: str, heads: Sequence[str], rows: Sequence[Sequence[str]], *, numbers_from: int = 1) -> Html | None:
    """A table whose columns from `numbers_from` on are numbers, set to the right; None without a row."""
    if not rows:
        return None

    def cells(name: str, row: Sequence[str]) -> Iterable[Html]:
        for place, cell in enumerate(row):
            yield tag(name if place else "th", cell, class_="number" if place >= numbers_from else None)

    lines = (tag("tr", *cells("td", row)) for row in rows)
    top = tag("thead", tag("tr", *cells("th", heads)))
    whole = tag("table", tag("caption", caption), top, tag("tbody", *lines))
    return tag("div", whole, class_="scroll", tabindex="0", role="region", aria_label=caption)


def as_text(value: object) -> str:
    """A setting or a figure as a person would write it, not too long."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(as_text(item) for item in value)[:MAX_TEXT] or "none"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, int) and value >= 10_000:
        return f"{value:,}"
    return str(value)[:MAX_TEXT]
