"""What a report says, as plain data: headlines, figures, and sections of parts. `terminal` and `page`
show it.

Here are the kinds of parts, and the words for phases, findings and changes. A terminal gets the brief
sections alone; the page gets all of them, with charts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from flatout.diagnose.breakdown import REST, UNSPLIT
from flatout.diagnose.by_cause import FROM_THE_REST
from flatout.diagnose.gains import LOADER_LIMITS
from flatout.diagnose.knobs import knob_for
from flatout.fix.result import Attempt
from flatout.model.causes import Finding
from flatout.model.changes import BY_NAME
from flatout.model.formatting import as_typed
from flatout.model.records import Facts

CAN_COST = 0.98  # a gain that may be below this is shown as a cost
MIN_SHOWN_GAIN = 1.005
_NEEDS_REASON = 0.2  # of the time: with a larger share, a promise beyond it is seen to be one
EARLIER = "work of earlier steps"
MAX_TEXT = 200
# What each phase is called, and the family of causes that its color stands for.
PHASES = {
    "data": ("waiting for data", "data"),
    "loader start": ("starting the loader", "data"),
    "copy": ("copying to the GPU", "copy"),
    "sync": ("waiting for the GPU", "sync"),
    "held": ("the GPU has enough to do", "compute"),
    "evaluation": ("evaluation", "pause"),
    "checkpoint": ("checkpoint", "pause"),
    "logging": ("logging", "pause"),
    "gc": ("garbage collection", "pause"),
    "launch": ("launching kernels", "sync"),
    "flatout": ("flatout's one-time setup", "other"),
    REST: ("your code outside these phases", "other"),
    "forward": ("forward", "compute"),
    "loss": ("loss", "compute"),
    "backward": ("backward", "compute"),
    "optimizer": ("optimizer", "compute"),
    UNSPLIT: ("computing", "compute"),
    EARLIER: (EARLIER, "compute"),
}


class TableBar(NamedTuple):
    """The bar beside a row: how long it is, and how much of that the GPU was idle, both as shares of
    the whole."""

    share: float
    family: str = "compute"
    idle: float = 0.0


class Table(NamedTuple):
    """Rows under their heads; columns from `numbers_from` on are numbers."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers_from: int = 1
    bars: Sequence[TableBar] = ()  # one for each row


class Item(NamedTuple):
    """A finding, or a change that was tried."""

    title: str
    code: str = ""
    where: str = ""
    brief: str = ""  # what it would give
    quiet: str = ""  # how that is known
    lines: Sequence[str] = ()  # an empty one is left out
    copy_as: str = ""  # what the lines to copy are for
    to_copy: Sequence[str] = ()  # the same
    evidence: Sequence[tuple[str, str]] = ()  # names and values


class CodeFrame(NamedTuple):
    """The hottest lines of one function of the user's: number, source, what it called, and share."""

    title: str
    lines: Sequence[tuple[int, str, str, float]]


class ChartBar(NamedTuple):
    """One bar of a chart: `left` and `width` are shares of the axis; `idle`: the GPU had nothing to do."""

    label: str
    family: str
    left: float
    width: float
    ms: float
    idle: bool = False
    where: str | None = None


class BarChart(NamedTuple):
    """Rows of bars on one axis that can be zoomed, from 0 to `end`; `legend` says what the colors
    stand for."""

    title: str
    note: str
    rows: Sequence[tuple[str, Sequence[ChartBar]]]
    end: float
    unit: str
    legend: Sequence[tuple[str, str]]


class Series(NamedTuple):
    """One line of a plot."""

    name: str
    family: str
    x: Sequence[float]
    y: Sequence[float]
    dashed: bool = False


class Plot(NamedTuple):
    """Lines over one axis."""

    title: str
    unit: str
    series: Sequence[Series]


class Mark(NamedTuple):
    """A stretch of the run that is not a plain training step."""

    name: str
    start_s: float
    length_s: float


class Plots(NamedTuple):
    """Plots that zoom together, with one axis, and what is shaded in them."""

    plots: Sequence[Plot]
    unit: str = "s"
    marks: Sequence[Mark] = ()


Part = Table | Item | CodeFrame | BarChart | Plots | str


class ReportSection(NamedTuple):
    """Parts under a title. One without a part is left out."""

    key: str
    title: str
    parts: Sequence[Part]


class ReportView(NamedTuple):
    """A whole report. Figures are names, values and remarks."""

    about: Sequence[str]
    headlines: Sequence[str]
    figures: Sequence[tuple[str, str, str]]
    sections: Sequence[ReportSection]
    notes: Sequence[str] = ()
    command: str = ""
    train_with: str = ""


# Words


def phase_name(phase: str) -> str:
    """A phase in words."""
    return PHASES.get(phase, (phase, ""))[0]


def phase_family(phase: str) -> str:
    """The family of causes a phase belongs to, which has one color."""
    return PHASES.get(phase, ("", "other"))[1]


def sentence(words: str) -> str:
    """With a capital letter, unless it begins with code or is one word, such as a folder."""
    first, space, _ = words.partition(" ")
    return words[:1].upper() + words[1:] if space and first.rstrip(":,;").isalpha() else words


def as_text(value: object) -> str:
    """A setting or a figure as a person would write it, not too long."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        value = [f"{str(name).replace('_', ' ')} {as_text(item)}" for name, item in value.items()]
    if isinstance(value, list | tuple):
        separator = "; " if value and isinstance(value[0], dict) else ", "
        return separator.join(map(as_text, value))[:MAX_TEXT] or "none"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, int) and value >= 10_000:
        return f"{value:,}"
    return str(value)[:MAX_TEXT]


def gain(finding: Finding) -> str:
    """What fixing it would give."""
    more = ", more once the loader can follow" * finding.derived.endswith(LOADER_LIMITS)
    if finding.derived.endswith(FROM_THE_REST) and finding.share >= _NEEDS_REASON:
        more = ", as the rest of a step is faster then too"
    if finding.gain_low < CAN_COST:
        return f"{finding.gain_low:.2f} to {finding.gain_high:.2f}× as fast on its own"
    if finding.gain_high < MIN_SHOWN_GAIN:
        return f"no gain on its own{more}"
    return f"{times_faster(finding)} faster{more}"


def times_faster(finding: Finding) -> str:
    """A gain as a range."""
    digits = 1 if finding.gain_high >= 1.95 else 2
    low, high = (f"{factor:.{digits}f}" for factor in (finding.gain_low, finding.gain_high))
    if finding.gain_low < 1.02:
        return f"up to {high}×"
    if low == high:
        return f"about {high}×"
    return f"{low} to {high}×"


def change_as_typed(facts: Facts, finding: Finding) -> str | None:
    """The change ready to paste: by the script's own flag or file, else as a line of code."""
    name, value = finding.change, finding.value
    if name == "gc_freeze" and value is None:
        value = True
    if name is None or value is None:
        return None
    # An ignored setting has its value already: typing it again would do nothing.
    if finding.code != "config.ignored":
        knob = knob_for(facts, name, value)
        if knob is not None and not (knob.startswith("-") and value is False):
            return _by_knob(knob, value)
    spec = BY_NAME.get(name)
    return spec.as_code(value, facts.training_loader.framework or "") if spec is not None else None


def permanently(attempt: Attempt, framework: str | None = None) -> str:
    """How to make a change permanent, in a line or two."""
    change = attempt.change
    if change.knob:
        edit = _by_knob(change.knob, change.value)
        return f"pass {edit}" if change.knob.startswith("-") else edit
    code = usual = f"{change.name} = {change.value!r}"
    if change.name in BY_NAME:
        spec = BY_NAME[change.name]
        code, usual = spec.as_code(change.value, framework or ""), spec.as_code(change.value)
    if not attempt.where or code != usual:  # a framework makes the call: there is no such line
        return code
    edit = f"{attempt.where}: {code}"
    if attempt.also:
        edit += f"; the same at {', '.join(attempt.also)}"
    return edit


def _by_knob(knob: str, value: Any) -> str:
    if knob.startswith("-"):
        return knob if value is True else f"{knob} {value}"
    file, _, key = knob.rpartition(":")
    if file.endswith(".py"):
        return f"in {file}: {key} = {value!r}"
    return f"in {file}: {key}: {as_typed(value)}"
