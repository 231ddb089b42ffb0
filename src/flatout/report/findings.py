"""Findings in words: the verdict as a sentence, gains, changes as one would type them, and the documented JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from flatout.diagnose.breakdown import REST
from flatout.diagnose.gains import HELD_BACK
from flatout.diagnose.knobs import knob_for
from flatout.model.finding import Finding
from flatout.report.account import Account
from flatout.report.chart_data import waterfall, words
from flatout.report.source_edits import as_code, by_knob
from flatout.report.terminal import WIDTH, wrapped

_INDENT = "   "
_MAY_COST = 0.98
GUIDE = (Path(__file__).parents[1] / "TROUBLESHOOTING.md").resolve()  # has an entry for every code


def headline(account: Account, findings: Sequence[Finding]) -> str:
    """The verdict in a sentence; without findings, what the account alone can say."""
    if findings:
        title = findings[0].title
        if findings[0].gain_high >= 1.05:
            return f"You could train {_times(findings[0])} faster: {title}."
        return f"{sentence(title)}."
    bars = waterfall(account.breakdown)
    if not account.breakdown.enough:
        seconds = account.breakdown.training_ms / 1e3
        return f"Not enough training steps to judge: {account.breakdown.steps} in {seconds:.2g} s."
    if bars[0].family != "compute" and bars[0].width >= 0.1:
        what = "code outside forward, backward and optimizer" if bars[0].label == words(REST) else bars[0].label
        return f"{bars[0].width:.0%} of training time goes to {what}."
    work = sum(bar.width for bar in bars if bar.family == "compute")
    return f"{work:.0%} of training time goes to forward, backward and optimizer."


def sentence(words: str) -> str:
    """With a capital at the beginning, unless it begins with code."""
    first = words.partition(" ")[0].rstrip(":,;")
    return words[:1].upper() + words[1:] if first.isalpha() else words


def told(finding: Finding) -> str:
    """It in a line."""
    where = f", {finding.where}" if finding.where else ""
    return f"{finding.title} ({gain(finding)}; {finding.code}{where})"


def gain(finding: Finding) -> str:
    """What mending it would give."""
    more = ", more once the loader can follow" if finding.derived.endswith(HELD_BACK) else ""
    if finding.gain_low < _MAY_COST:
        return f"{finding.gain_low:.2f} to {finding.gain_high:.2f}× as fast by itself"
    return (f"{_times(finding)} faster" if finding.gain_high >= 1.005 else "no gain by itself") + more


def _times(finding: Finding) -> str:
    digits = 1 if finding.gain_high >= 1.95 else 2
    low, high = (f"{factor:.{digits}f}" for factor in (finding.gain_low, finding.gain_high))
    if finding.gain_low < 1.02:
        return f"up to {high}×"
    return f"about {high}×" if low == high else f"{low} to {high}×"


def change_as_typed(account: Account, finding: Finding) -> str | None:
    """The change ready to paste: by the script's own flag or file, else a line of code, where there is one."""
    if finding.change is None or finding.value is None:
        return None if finding.change != "gc_freeze" else as_code("gc_freeze", True)
    # An ignored setting has its value already: typing it again would do nothing.
    ignored = finding.code == "config.ignored"
    knob = None if ignored else knob_for(account.facts.settings, finding.change, finding.value)
    if knob is not None and not (knob.startswith("-") and finding.value is False):
        return by_knob(knob, finding.value)
    by_trainer = any(loader.by_trainer for loader in account.facts.loaders)
    return as_code(finding.change, finding.value, by_trainer=by_trainer)


def show(account: Account, findings: Sequence[Finding], console: Console) -> None:
    """Print the verdict, and each finding with what to change."""
    width = min(WIDTH, console.width)
    if account.ended is not None:
        console.print(Text(wrapped(f"{account.ended}.", width), style="bold red"), soft_wrap=True)
    console.print(Text(wrapped(headline(account, findings), width), style="bold"), soft_wrap=True)
    for number, finding in enumerate(findings, 1):
        lines = [told(finding), finding.advice, change_as_typed(account, finding) or ""]
        text = f"\n{_INDENT}".join(wrapped(line, width, len(_INDENT)) for line in lines if line)
        console.print(Text(f"{number}. {text}"), soft_wrap=True)
    if any(finding.gain_high >= 1.005 for finding in findings):
        here = Path.cwd()
        guide = GUIDE.relative_to(here) if GUIDE.is_relative_to(here) else GUIDE
        guide_line = wrapped(f"each cause, how to make sure, what to do: {guide}", width, len(_INDENT))
        console.print(Text(_INDENT + guide_line, style="dim"), soft_wrap=True)
    console.print()


def to_json(account: Account, findings: Sequence[Finding]) -> dict[str, Any]:
    """The documented JSON of a report: the account, with the verdict and the findings, ranked."""
    plain = account.to_json()
    opening = {"schema": plain.pop("schema"), "verdict": findings[0].code if findings else None}
    return {**opening, "findings": [as_json(finding) for finding in findings], **plain}


def as_json(finding: Finding) -> dict[str, Any]:
    """One of them, as documented."""
    data = dataclasses.asdict(finding)
    data["change"] = {"name": finding.change, "value": data.pop("value")} if finding.change is not None else None
    return data
