"""Findings in words, and changes as one would type them: a flag, a line of a file, or an edit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flatout.diagnose.breakdown import ENOUGH_STEPS
from flatout.diagnose.find_knobs import knob_for
from flatout.diagnose.gains import LOADER_LIMITS
from flatout.fix.result import Attempt
from flatout.model.changes import BY_NAME
from flatout.model.finding import Finding
from flatout.model.formatting import as_typed
from flatout.model.stats import FEW_STEPS, LONG_S
from flatout.report.account import Account
from flatout.report.chart_data import waterfall

CAN_COST = 0.98  # a gain that may be below this is shown as a cost
MIN_SHOWN_GAIN = 1.005
GUIDE = (Path(__file__).parents[1] / "TROUBLESHOOTING.md").resolve()  # has an entry for every code


def headline(account: Account, findings: Sequence[Finding]) -> str:
    """The verdict in a sentence; without findings, what the account alone can say."""
    if findings:
        title = findings[0].title
        if findings[0].gain_high >= 1.05:
            return f"You could train {_times(findings[0])} faster: {title}."
        return f"{sentence(title)}."
    b = account.breakdown
    if not b.enough:
        would_do = f"{ENOUGH_STEPS}, or {FEW_STEPS} in {LONG_S:.0f} s, would do"
        return f"Not enough training steps to judge: {b.steps} in {b.training_ms / 1e3:.2g} s ({would_do})."
    longest = waterfall(b)[0]
    return f"{longest.width:.0%} of training time goes to {longest.label}."


def sentence(words: str) -> str:
    """With a capital letter, unless it begins with code."""
    first = words.partition(" ")[0].rstrip(":,;")
    return words[:1].upper() + words[1:] if first.isalpha() else words


def gain(finding: Finding) -> str:
    """What fixing it would give."""
    more = ", more once the loader can follow" if finding.derived.endswith(LOADER_LIMITS) else ""
    if finding.gain_low < CAN_COST:
        return f"{finding.gain_low:.2f} to {finding.gain_high:.2f}× as fast on its own"
    if finding.gain_high < MIN_SHOWN_GAIN:
        return f"no gain on its own{more}"
    return f"{_times(finding)} faster{more}"


def _times(finding: Finding) -> str:
    digits = 1 if finding.gain_high >= 1.95 else 2
    low, high = (f"{factor:.{digits}f}" for factor in (finding.gain_low, finding.gain_high))
    if finding.gain_low < 1.02:
        return f"up to {high}×"
    if low == high:
        return f"about {high}×"
    return f"{low} to {high}×"


def finding_to_json(finding: Finding) -> dict[str, Any]:
    """A finding as documented."""
    data = dataclasses.asdict(finding)
    value = data.pop("value")
    if finding.change is not None:
        data["change"] = {"name": finding.change, "value": value}
    return data


# Changes as one would type them


def change_as_typed(account: Account, finding: Finding) -> str | None:
    """The change ready to paste: by the script's own flag or file, else as a line of code."""
    if finding.change == "gc_freeze" and finding.value is None:
        return as_code("gc_freeze", True)
    if finding.change is None or finding.value is None:
        return None
    # An ignored setting has its value already: typing it again would do nothing.
    if finding.code != "config.ignored":
        knob = knob_for(account.facts.settings, finding.change, finding.value)
        if knob is not None and not (knob.startswith("-") and finding.value is False):
            return by_knob(knob, finding.value)
    return as_code(finding.change, finding.value, account.facts.training_loader.framework)


def permanently(attempt: Attempt, framework: str | None = None) -> str:
    """How to make a change permanent, in a line or two."""
    change = attempt.change
    if change.knob.startswith("-"):
        return f"pass {by_knob(change.knob, change.value)}"
    if change.knob:
        return by_knob(change.knob, change.value)
    spec = BY_NAME.get(change.name)
    code = as_code(change.name, change.value, framework) or f"{change.name} = {change.value!r}"
    by_framework = spec is not None and code != spec.as_code(change.value)
    if not attempt.where or by_framework:
        return code
    edit = f"{attempt.where}: {code}"
    if attempt.also:
        edit += f"; the same at {', '.join(attempt.also)}"
    return edit


def as_code(name: str, value: Any, framework: str | None = None) -> str | None:
    """A change as a line of Python, where there is one; also where a framework makes the call."""
    spec = BY_NAME.get(name)
    return spec.as_code(value, framework or "") if spec is not None else None


def by_knob(knob: str, value: Any) -> str:
    """A value as it is given to a flag, or written in a file."""
    if knob.startswith("-"):
        return knob if value is True else f"{knob} {value}"
    file, _, key = knob.rpartition(":")
    if file.endswith(".py"):
        return f"in {file}: {key} = {value!r}"
    return f"in {file}: {key}: {as_typed(value)}"
