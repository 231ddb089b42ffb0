"""HTML from Python. Text is escaped unless it is already Html, so nothing in a trace can become markup."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

MAX_TEXT = 200


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """An element. `class_` is class, `aria_label` aria-label. Attributes and children that are None are left out."""
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


def remark(text: str) -> Html | None:
    """A quiet paragraph; None without text."""
    return tag("p", text, class_="meta") if text else None


def table(
    caption: str, heads: Sequence[str], rows: Iterable[Sequence[object]], *, numbers_from: int = 1
) -> Html | None:
    """A table whose columns from `numbers_from` on are numbers, set to the right; None without a row."""
    styles = [None] * numbers_from + ["number"] * len(heads)
    top = (tag("th", head, class_=style, scope="col") for head, style in zip(heads, styles, strict=False))
    lines = []
    for first, *others in rows:
        cells = (tag("td", cell, class_=style) for cell, style in zip(others, styles[1:], strict=False))
        lines.append(tag("tr", tag("th", first, scope="row"), *cells))
    if not lines:
        return None
    whole = tag("table", tag("caption", caption), tag("thead", tag("tr", *top)), tag("tbody", *lines))
    return tag("div", whole, class_="scroll", tabindex="0", role="region", aria_label=caption)


def folded(summary: str, *children: object) -> Html:
    """Details that are closed until one opens them."""
    return tag("details", tag("summary", summary), *children)


def key_figures(rows: Iterable[tuple[str, str, str]]) -> Html:
    """The few numbers that matter: name, value, remark."""
    entries = (tag("div", tag("dt", name), tag("dd", value, tag("small", remark))) for name, value, remark in rows)
    return tag("dl", *entries, class_="figures")


def copyable(text: str) -> Html:
    """A line to copy."""
    button = tag("button", "Copy", type="button", data_copy=text)
    return tag("div", tag("pre", tag("code", text)), button, class_="copyable")


def as_text(value: object) -> str:
    """A setting or a figure as a person would write it, not too long."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{key} {as_text(item)}" for key, item in value.items())[:MAX_TEXT]
    if isinstance(value, list | tuple):
        return ", ".join(as_text(item) for item in value)[:MAX_TEXT] or "none"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, int) and value >= 10_000:
        return f"{value:,}"
    return str(value)[:MAX_TEXT]
