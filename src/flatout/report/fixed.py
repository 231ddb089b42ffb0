"""What a fix has come to → FixReport: before and after in figures, and the documented JSON."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flatout.diagnose.rank_metrics import cases
from flatout.diagnose.rules import diagnose
from flatout.fix.offers import Offer, in_words
from flatout.fix.result import Attempt, FixResult
from flatout.fix.runs import Run
from flatout.fix.speed import Speed
from flatout.model.changes import CHANGES
from flatout.model.finding import Finding
from flatout.model.formatting import in_full
from flatout.model.plan import Figure
from flatout.model.stats import MIN_GAIN, Gain, RunNoise
from flatout.redact import redact_command, redact_text
from flatout.report.findings import as_json
from flatout.report.source_edits import permanently

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Price:
    """What an hour costs: 2.5/h, $2.5/h, 2.5EUR/h."""

    an_hour: float
    sign: str = ""
    in_front: bool = False

    @classmethod
    def of(cls, text: str) -> Price:
        """As a person writes it; ValueError where that is no price."""
        sign = r"([A-Za-z]{1,4}|[$€£¥₹₩])?"
        match = re.fullmatch(rf"{sign}\s*(\d+(?:\.\d+)?)\s*{sign}\s*(?:/\s*h)?", text.strip())
        if match is None or (match[1] and match[3]):
            raise ValueError(f"{text} is no price an hour")
        return cls(float(match[2]), match[1] or match[3] or "", bool(match[1]))

    def figure(self, amount: float) -> str:
        """So much money, with its sign if it has one."""
        return f"{self.sign}{in_full(amount)}" if self.in_front else f"{in_full(amount)} {self.sign}".strip()

    @property
    def unit(self) -> str:
        """What has to be said of a figure without a sign."""
        return "" if self.sign else "in the currency of --price"


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A training in figures; what the machine does not tell is None."""

    samples_per_s: float
    unit: str
    steps: int
    step_ms: float | None
    sm_active_pct: float | None
    gpu_util_pct: float | None
    power_w: float | None
    joules_a_sample: float | None
    epoch_s: float | None
    epoch_money: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FixReport:
    """Everything a view of a fix may show."""

    command: tuple[str, ...]
    plan_file: str
    found: FixResult
    before: Side | None
    after: Side | None
    left: tuple[Finding, ...] = ()  # what only a person can mend
    price: Price | None = None

    @property
    def kept(self) -> list[Attempt]:
        """In the order of the plan."""
        by_name = {a.change.name: a for a in self.found.attempts if a.outcome.verdict == "kept"}
        return [by_name[change.name] for change in self.found.kept]

    @property
    def undone(self) -> list[Attempt]:
        return [attempt for attempt in self.found.attempts if attempt.outcome.verdict != "kept"]

    @property
    def train_with(self) -> str:
        """The command to train with what was kept."""
        return f"flatout run --plan {self.plan_file} -- {shlex.join(self.command)}"

    @property
    def unit(self) -> str:
        """Of the speeds before and after."""
        unit = self.after.unit if self.after is not None else "samples/s"
        return f"{unit}, pauses counted" if self.found.paused else unit

    def permanently(self, attempt: Attempt) -> str:
        """How to make a change for good."""
        before = self.found.before
        by_trainer = before is not None and before.trace is not None and before.case.loader.by_trainer
        return redact_text(permanently(attempt, by_trainer=bool(by_trainer)))  # it may be a line of the script

    def sentence(self) -> str:
        """The answer."""
        found = self.found
        if found.written:
            return f"Ended, because a trial has written to your files: {', '.join(found.written)}."
        if found.interrupted and not found.kept:
            return "Interrupted: nothing was kept so far."
        if found.untried and not found.attempts:
            return f"Nothing was tried: {found.stopped}."
        if not found.kept:
            tried = "nothing was worth trying"
            if found.attempts:
                names = dict.fromkeys(in_words(attempt.change) for attempt in found.attempts)
                unsafe = any(a.outcome.verdict == "unsafe" for a in found.attempts)
                unsure = any(a.gain is not None and a.gain.high >= MIN_GAIN for a in found.attempts)
                why = "not safe, or not worth it" if unsafe else "no gain was sure" if unsure else "not worth it"
                tried = f"tried, and {why}: {', '.join(names)}"
            return f"Nothing to change: {tried} ({found.stopped})."
        changes = f"{len(found.kept)} change{'s' if len(found.kept) > 1 else ''} kept"
        speeds = ""
        if self.before is not None and self.after is not None:
            speeds = f", {in_full(self.before.samples_per_s)} → {in_full(self.after.samples_per_s)} {self.unit}"
        if found.gain is None:
            return f"{changes} ({found.stopped}){speeds}: not measured as a whole."
        if found.gain.low <= 1:
            return f"{changes}, but in the end the gain is not sure: {found.gain}{speeds}."
        return f"Trains {found.gain.value:.2f}× as fast ({found.gain.low:.2f} to {found.gain.high:.2f}){speeds}."

    def to_json(self) -> dict[str, Any]:
        """The documented JSON of `flatout fix --json`."""
        found = self.found
        return {
            "schema": SCHEMA,
            "command": list(self.command),
            "plan": self.plan_file,
            "sentence": self.sentence(),
            "gain": _plain(found.gain),
            "before": _plain(self.before),
            "after": _plain(self.after),
            "currency": (self.price.sign if self.price is not None else "") or None,
            "kept": [_attempt(attempt, self.permanently(attempt)) for attempt in self.kept],
            "undone": [_attempt(attempt) for attempt in self.undone],
            "withheld": [_offer(offer) for offer in found.withheld],
            "left": [as_json(finding) for finding in self.left],
            "trials": [
                {"what": t.what, "seconds": t.seconds, "samples_per_s": t.speed.value if t.speed is not None else None}
                for t in found.trials
            ],
            "noise": _plain(found.noise),
            "remarks": found.remarks,
            "stopped": found.stopped,
            "interrupted": found.interrupted,
            "written": list(found.written),
            "seconds": found.seconds,
        }


def bundles(attempts: Sequence[Attempt]) -> list[list[Attempt]]:
    """What was measured together and came to the same end, as one."""
    together: dict[tuple[Any, ...], list[Attempt]] = {}
    for attempt in attempts:
        names = frozenset((in_words(attempt.change), *attempt.together))
        outcome = attempt.outcome
        end = outcome.note if outcome.verdict != "kept" else ""
        together.setdefault((names, attempt.gain, outcome.verdict, end), []).append(attempt)
    return list(together.values())


def report(found: FixResult, command: Sequence[str], plan_file: str, price: Price | None = None) -> FixReport:
    """Before and after, side by side: their speeds over all their runs where the gain is, all else of the last one."""
    last = (found.before, found.measured)
    speeds = found.speeds if found.speeds is not None and found.gain is not None else (None, None)
    before, after = (
        _side(run, speed or run.speed, price, paused=found.paused) if run is not None else None
        for run, speed in zip(last, speeds, strict=True)
    )
    return FixReport(
        command=redact_command(command),
        plan_file=plan_file,
        found=found,
        before=before,
        after=after,
        left=_left(found),
        price=price,
    )


def _left(found: FixResult) -> tuple[Finding, ...]:
    """What holds training up as it is now, and no change of ours has mended: it has none, the script has no knob, or
    data is still waited for though something was tried that might have helped."""
    run = found.measured if found.kept else found.before
    if run is None or run.trace is None:
        return ()
    ours = {spec.name for spec in CHANGES if spec.family != "pauses"} | found.known
    in_vain = {a.change.name for a in found.attempts if a.gain is None or a.gain.value > MIN_GAIN} - found.offered
    in_vain -= {change.name for change in found.kept}
    left = []
    for finding in (finding for finding in diagnose(run.trace) if finding.gain_high >= MIN_GAIN):
        if finding.change not in ours:
            left.append(finding)
        elif finding.code.startswith("data.") and finding.change in in_vain:
            left.append(dataclasses.replace(finding, advice=f"{finding.advice} (tried, and not kept)"))
    return tuple(left)


def _side(run: Run, speed: Speed | None, price: Price | None, *, paused: bool) -> Side | None:
    if run.trace is None or speed is None:
        return None
    case = cases(run.trace)[0]
    power = case.card("power_w").mean
    power = power * len(run.trace.ranks) if power is not None else None
    counted, rate = speed.unit == "samples/s", speed.with_pauses if paused else speed.value
    epoch_s = run.epoch_s(speed)
    return Side(
        samples_per_s=rate,
        unit=speed.unit,
        steps=speed.steps,
        step_ms=case.step_ms or None,
        sm_active_pct=case.card("sm_active_pct").mean,
        gpu_util_pct=case.card("gpu_util_pct").mean,
        power_w=power,
        joules_a_sample=power / rate if power is not None and counted else None,
        epoch_s=epoch_s,
        epoch_money=epoch_s / 3600 * price.an_hour if epoch_s is not None and price is not None else None,
    )


def _attempt(attempt: Attempt, permanently: str | None = None) -> dict[str, Any]:
    outcome = attempt.outcome
    return {
        **dataclasses.asdict(attempt.change),
        "verdict": outcome.verdict,
        "gain": _plain(attempt.gain),
        "together": list(attempt.together),
        "before": _plain(outcome.before),
        "after": _plain(outcome.after),
        "proof": outcome.proof,
        "why": outcome.note,
        "made": attempt.made,
        "where": attempt.where,
        "also": list(attempt.also),
        "permanently": permanently,
    }


def _offer(offer: Offer) -> dict[str, Any]:
    changes = [{"name": change.name, "value": change.value} for change in offer.changes]
    return {"changes": changes, "why": offer.why, "promise": offer.promise}


def _plain(record: Side | Gain | RunNoise | Figure | None) -> dict[str, Any] | None:
    return dataclasses.asdict(record) if record is not None else None
