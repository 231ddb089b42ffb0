"""A Trace as one HTML file that opens from disk, without a network, in any browser of the last years.

What needs no interaction (bars, steps, lanes, tables) is plain HTML, so it prints and reads well without a script;
the figures over time are drawn by Plotly, which is inlined. Every plot has its figures in a table behind it.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.resources import files

from flatout import __version__
from flatout.model.finding import Finding
from flatout.report import chart_data, chart_html, detail
from flatout.report.account import Account
from flatout.report.chart_data import Bar, Mark, Panel, timelines, waterfall, whole_run
from flatout.report.findings import GUIDE, change_as_typed, gain, headline, sentence
from flatout.report.markup import Html, copyable, figures, folded, join, shown, spoken, table, tag
from flatout.report.terminal import ceiling, duration, ms
from flatout.trace import RankTrace, Trace

# Nothing is fetched and no script runs but ours, whatever a trace may hold: the browser itself sees to it. Plotly sets
# styles on what it draws.
_POLICY = (
    "default-src 'none'; script-src {}; style-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)

Section = tuple[str, str, Html | None]  # its key, its title, and what stands in it


def page(trace: Trace, account: Account, findings: Sequence[Finding] = ()) -> str:
    """The report of one run."""
    first = trace.ranks[0]
    drawn, marked = chart_data.panels(trace, first), chart_data.marks(trace, first)
    sections: list[Section] = [
        ("findings", "What to change", finding_list(account, findings)),
        ("time", "Where the time went", time_spent(account)),
        ("steps", "Two steps, looked at closely", join(chart_html.step_figure(t) for t in timelines(first))),
        ("run", "Over the run", chart_html.over_time(drawn, marked)),
        ("loading", "Loading", detail.loading(account, first)),
        ("sync", "Synchronizing calls", detail.sync(account, first)),
        ("xray", "X-ray: kernel by kernel", detail.xray(account)),
        ("cards", "The cards", detail.cards(trace)),
        ("ranks", "The ranks", detail.ranks(account.by_rank)),
        ("facts", "The facts", detail.facts(account)),
        ("cost", "What measuring cost", detail.cost(account)),
        ("notes", "Notes", detail.notes(account)),
    ]
    return document(f"flatout: {account.name}", _head(account, first, findings), sections, drawn, marked)


def document(
    title: str, head: Html, sections: Sequence[Section], panels: Sequence[Panel], marks: Sequence[Mark] | None = None
) -> str:
    """A whole page: what stands at its top, its sections, those with nothing to say left out, and what its plots draw.

    `marks` is None where the plots are by step, not over time.
    """
    sections = [section for section in sections if section[2]]
    here = files("flatout.report")
    style, script = ((here / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    contents = tag("nav", *(tag("a", name, href=f"#{key}") for key, name, _ in sections), aria_label="Contents")
    body = join(
        tag("section", tag("h2", name, id=f"{key}-title"), content, id=key, aria_labelledby=f"{key}-title")
        for key, name, content in sections
    )
    foot = tag(
        "footer", f"Made by flatout {__version__}. Every figure was measured in this run unless it says otherwise."
    )
    plots = {
        "timed": marks is not None,
        "panels": [dataclasses.asdict(panel) for panel in panels],
        "marks": [dataclasses.asdict(mark) for mark in marks or ()],
    }
    data = json.dumps(plots, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    scripts = [script]
    if panels:
        scripts.insert(0, (files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8"))
    opening = join(
        [
            Html('<meta charset="utf-8">'),
            tag("meta", http_equiv="Content-Security-Policy", content=_POLICY.format(" ".join(map(_hash, scripts)))),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", name="color-scheme", content="light dark"),
            tag("title", title),
            Html(f"<style>{style}</style>"),
        ]
    )
    plot_data = Html(f'<script type="application/json" id="plot-data">{data}</script>')
    running = [Html(f"<script>{script}</script>") for script in scripts]
    whole = tag("body", tag("main", tag("header", head), contents, body, foot), plot_data, *running)
    return f'<!doctype html>\n<html lang="en"><head>{opening}</head>{whole}</html>\n'


def _hash(script: str) -> str:
    """A script as a content security policy allows it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


# The top


def _head(account: Account, first: RankTrace, findings: Sequence[Finding]) -> Html:
    info = first.info
    began = datetime.fromtimestamp(info.started_unix_s, timezone.utc) if info.started_unix_s else None
    about = [account.name, info.host, account.facts.gpu, f"{began:%d %B %Y, %H:%M} UTC" if began else None]
    return join(
        [
            tag("p", tag("strong", "flatout"), " · ", " · ".join(str(word) for word in about if word), class_="about"),
            tag("h1", f"{account.ended}.", class_="warning") if account.ended is not None else None,
            tag("p" if account.ended is not None else "h1", headline(account, findings)),
            figures(_figures(account)),
            tag("pre", tag("code", " ".join(account.command)), class_="command", aria_label="The command")
            if account.command
            else None,
        ]
    )


def _figures(account: Account) -> list[tuple[str, str, str]]:
    b = account.breakdown
    shown = [("steps", f"{b.steps:,}", f"{duration(b.training_ms)} of training, {duration(b.wall_ms)} in all")]
    median, p95 = b.step_ms.quantile(0.5), b.step_ms.quantile(0.95)
    if median is not None and p95 is not None:
        shown.append(("median step", ms(median), f"95% below {ms(p95)}"))
    if b.samples_per_s:
        shown.append(("samples a second", f"{b.samples_per_s:,.0f}", ceiling(b) or "no ceiling was measured"))
    active, util = account.gpu.get("sm_active_pct"), account.gpu.get("gpu_util_pct")
    if active is not None:
        shown.append(("SM active", f"{active:.0f}%", f"GPU-Util says {util:.0f}%" if util is not None else "mean"))
    elif util is not None:
        shown.append(("GPU-Util", f"{util:.0f}%", "this card does not say how many SMs were active"))
    if account.xray is not None and account.xray.wall_ms:
        busy = account.xray.busy_ms / account.xray.wall_ms
        shown.append(("GPU busy", f"{busy:.0%}", f"X-ray of {account.xray.steps} steps"))
    return shown


# Findings


def finding_list(account: Account, findings: Sequence[Finding]) -> Html | None:
    """Each with its evidence, and what to change."""
    if not findings:
        return None
    return tag("ol", *(tag("li", _finding(account, finding)) for finding in findings), class_="findings")


def _finding(account: Account, finding: Finding) -> Html:
    meta = [
        gain(finding),
        f"{finding.share:.0%} of wall time",
        f"confidence {finding.confidence:.0%}",
        finding.derived,
    ]
    change = change_as_typed(account, finding)
    return tag(
        "article",
        tag(
            "p",
            tag("code", finding.code, class_="chip", title=f"{GUIDE.name}: {finding.code}"),
            tag("span", finding.where, class_="where") if finding.where else None,
        ),
        tag("h3", sentence(finding.title)),
        tag("p", " · ".join(meta), class_="meta"),
        tag("p", sentence(finding.advice)) if finding.advice else None,
        copyable(change) if change else None,
        folded(
            "Evidence",
            table("Evidence", ("what", "value"), [(spoken(k), shown(v)) for k, v in finding.evidence.items()]),
        )
        if finding.evidence
        else None,
        class_=f"finding {finding.code.partition('.')[0]}",
    )


# Time


def time_spent(account: Account) -> Html:
    b = account.breakdown
    bars = waterfall(b)
    on_gpu = any(bar.idle is not None for bar in bars)
    hidden = table(
        "Training's time by cause",
        ("cause", "where", "share", "a step", "GPU idle meanwhile"),
        [(x.label, x.where or "", f"{x.width:.2%}", ms(x.ms / max(1, b.steps)), _idle(x, b.steps)) for x in bars],
        numbers_from=2,
    )
    key = "Striped: the GPU stood idle meanwhile." if on_gpu else None
    return join(
        [
            tag("h3", f"The whole run: {duration(b.wall_ms)}"),
            chart_html.strip(whole_run(b), "The whole run"),
            tag(
                "h3",
                f"Training: {b.steps:,} steps in {duration(b.training_ms)}, from all of it down to the work itself",
            ),
            chart_html.falls(bars, b.steps, account.xray) if bars else tag("p", "No training step was recorded."),
            tag("p", key, class_="meta") if key else None,
            folded("The figures", hidden) if bars else None,
        ]
    )


def _idle(bar: Bar, steps: int) -> str:
    return ms(bar.ms * bar.idle / max(1, steps)) if bar.idle is not None else ""
