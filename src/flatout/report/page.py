"""A Report as one HTML file that opens from disk, without a network, in any browser of the last years.

Everything is drawn before the page is opened; the page's own script only zooms, reads values and copies. The browser
fetches nothing and uses no script or style but the page's, whatever a trace may hold. A section with nothing to say is
left out.
"""

from __future__ import annotations

import base64
import hashlib
import re
from html import escape
from importlib.resources import files

from flatout import __version__
from flatout.report import Report
from flatout.report.code_lines import CodeFrame
from flatout.report.findings import GUIDE, sentence
from flatout.report.markup import Html, join, table, tag
from flatout.report.views import Item, Part, ReportView, Table, view_of


def page(report: Report) -> str:
    """The whole page."""
    view, contents, sections = view_of(report), [], []
    for section in view.sections:
        body = join(_part(part) for part in section.parts if part)
        if body:
            contents.append(tag("a", section.title, href=f"#{section.key}"))
            heading = tag("h2", section.title, id=f"{section.key}-title")
            sections.append(tag("section", heading, body, id=section.key, aria_labelledby=f"{section.key}-title"))
    template = (files("flatout.report") / "page.html").read_text(encoding="utf-8")
    values = {
        "title": escape(": ".join(view.about[:2])),
        "script": _hash_of("script", template),
        "style": _hash_of("style", template),
        "version": __version__,
        "head": _head(view),
        "contents": join(contents),
        "sections": join(sections),
    }
    return re.sub(r"{{(\w+)}}", lambda match: values[match[1]], template)


def _hash_of(name: str, template: str) -> str:
    """The page's script or style as a content security policy names it."""
    text = template.partition(f"<{name}>")[2].partition(f"</{name}>")[0]
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _head(view: ReportView) -> Html:
    first, *others = view.about
    figures = (
        tag("div", tag("dt", name), tag("dd", value, tag("small", remark))) for name, value, remark in view.figures
    )
    return join(
        [
            tag("p", tag("strong", first), *(f" · {part}" for part in others if part), class_="about"),
            tag("h1", view.headlines[0]),
            *(tag("p", line) for line in view.headlines[1:]),
            tag("dl", *figures, class_="figures"),
            *(tag("pre", tag("code", line), class_="command", aria_label="The command") for line in view.command),
            *map(_copyable, view.train_with),
            *(tag("p", f"Note: {note}.", class_="warning") for note in view.notes),
        ]
    )


def _part(part: Part) -> Html | None:
    if isinstance(part, Item):
        return _item(part)
    if isinstance(part, CodeFrame):
        return _code(part)
    if isinstance(part, Table):
        shown = table(part.title, part.heads, part.rows, numbers_from=part.numbers_from)
        if part.folded and shown:
            return tag("details", tag("summary", part.title), shown)
        return shown
    return tag("p", part) if isinstance(part, str) else part()


def _code(frame: CodeFrame) -> Html:
    """Lines of source with their shares."""
    rows = []
    for number, source, called, share in frame.lines:
        beside = tag("span", f"  → {called}", class_="quiet") if called else None
        rows.append(tag("span", f"{share:>5.0%} ", tag("i", f"{number:>5} │ "), source, beside, "\n"))
    return tag("div", tag("h3", frame.title), tag("pre", tag("code", *rows), class_="frame-of-code", tabindex="0"))


def _item(item: Item) -> Html:
    code = tag("code", item.code, class_="chip", title=f"{GUIDE.name}: {item.code}")
    lines = filter(None, (*item.lines, item.copy_as))
    return tag(
        "article",
        tag("p", code, tag("span", item.where, class_="where")),
        tag("h3", sentence(item.title)),
        tag("p", " · ".join(filter(None, (item.brief, item.quiet))), class_="meta"),
        *(tag("p", sentence(line)) for line in lines),
        *map(_copyable, filter(None, item.to_copy)),
        *map(_part, item.evidence),
        class_=f"finding {item.code.partition('.')[0]}",
    )


def _copyable(text: str) -> Html:
    """A line to copy."""
    button = tag("button", "Copy", type="button", data_copy=text)
    return tag("div", tag("pre", tag("code", text)), button, class_="copyable")
