"""HTML from Python: text is escaped unless it is already Html, so that nothing a trace holds can become markup."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """An element. `class_` is class, `aria_label` aria-label; an attribute or child that is None is left out."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{given}>" if name == "meta" else f"<{name}{given}>{join(children)}</{name}>")


def join(children: Iterable[object]) -> Html:
    """One after the other."""
    return Html(
        "".join(child if isinstance(child, Html) else escape(str(child)) for child in children if child is not None)
    )


def table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[object]], *, numbers_from: int = 1) -> Html:
    """A table whose columns from `numbers_from` on are figures, set to the right."""

    def cells(kind: str, row: Sequence[object]) -> Html:
        return join(
            tag(
                "th" if place == 0 or kind == "th" else "td",
                cell,
                class_="figure" if place >= numbers_from else None,
                scope="col" if kind == "th" else "row" if place == 0 else None,
            )
            for place, cell in enumerate(row)
        )

    body = tag("tbody", *(tag("tr", cells("td", row)) for row in rows))
    head = tag("thead", tag("tr", cells("th", heads)))
    whole = tag("table", tag("caption", caption), head, body)
    return tag("div", whole, class_="scroll", tabindex="0", role="region", aria_label=caption)


def folded(summary: str, *children: object) -> Html:
    """Something to look into when one wants to; evidence is unfolded in print."""
    return tag("details", tag("summary", summary), *children)


def figures(shown: Sequence[tuple[str, str, str]]) -> Html:
    """The few numbers that matter: name, value, and a word about it."""
    return tag(
        "dl",
        *(tag("div", tag("dt", name), tag("dd", value, tag("small", remark))) for name, value, remark in shown),
        class_="figures",
    )


def copyable(text: str) -> Html:
    """A line to copy."""
    return tag(
        "div", tag("pre", tag("code", text)), tag("button", "Copy", type="button", data_copy=text), class_="copyable"
    )


def spoken(key: str) -> str:
    """A key as words."""
    return key.replace("_", " ")


def shown(value: object) -> str:
    """A setting or a figure as a person would write it, not too long."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{k} {shown(v)}" for k, v in value.items())[:200]
    if isinstance(value, list | tuple):
        return ", ".join(shown(item) for item in value)[:200] or "none"
    if isinstance(value, int):
        return f"{value:,}" if value >= 10_000 else str(value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)[:200]
