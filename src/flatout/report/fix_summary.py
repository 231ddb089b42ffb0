"""What a fix found → FixSummary: before and after in figures, each change in words, and the JSON."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flatout.fix.offers import all_in_words, in_words
from flatout.fix.patch import FilePatch
from flatout.fix.result import Attempt, FixResult
from flatout.fix.runs import Run
from flatout.fix.speed import Speed
from flatout.model.causes import Finding
from flatout.model.changes import CHANGES
from flatout.model.formatting import count_of, duration, in_full, ms
from flatout.model.stats import MIN_GAIN
from flatout.redact import redact_command, redact_text
from flatout.report.account import Price, RecordedRun, finding_to_json, run_of
from flatout.report.comparison import Comparison, compare
from flatout.report.run_view import finding_item, time_spent
from flatout.report.views import (
    Item,
    ReportSection,
    ReportView,
    Table,
    TableBar,
    permanently,
)

SCHEMA = 1
SAFETY_IN_WORDS = {
    "identical": "bit for bit the same",
    "reseeded": "the same samples in the same order, other random numbers",
    "equivalent": "the same mathematics, other rounding",
    "semantic": "changes what is learned",
}


Side = dict[str, Any]  # a training in figures, as documented; what the machine does not tell is None


@dataclass(frozen=True, slots=True, kw_only=True)
class FixSummary:
    """Everything a renderer may show of a fix."""

    command: tuple[str, ...]
    plan_file: str
    result: FixResult
    before: Side | None
    after: Side | None
    left: tuple[Finding, ...]  # what no change of ours has fixed
    price: Price | None
    run: RecordedRun | None  # the training as it is now; None if the first run of the fix failed
    comparison: Comparison | None  # of before and after
    patch: FilePatch | None = None  # of the person's files, if it was asked for

    @property
    def kept(self) -> list[Attempt]:
        """In the order of the plan."""
        by_name = {attempt.change.name: attempt for attempt in self.result.attempts if attempt.is_kept}
        return [by_name[change.name] for change in self.result.kept]

    @property
    def undone(self) -> list[Attempt]:
        return [attempt for attempt in self.result.attempts if not attempt.is_kept]

    @property
    def train_with(self) -> str:
        """The command to train with what was kept."""
        return f"flatout run --plan {self.plan_file} -- {shlex.join(self.command)}"

    @property
    def unit(self) -> str:
        """Of the speeds before and after."""
        unit = self.before["unit"] if self.before is not None else "samples/s"
        return f"{unit}, pauses counted" if self.result.paused else unit

    @property
    def runs(self) -> str:
        """How many runs there were, how far they vary, and why it stopped."""
        result = self.result
        text = f"{count_of(len(result.trials), 'run')} in {duration(1e3 * result.seconds)}; stopped: {result.stopped}."
        if result.noise is not None and result.noise.repeats:
            repeats = count_of(result.noise.repeats, "repeat")
            text += f" Runs of the same plan vary by ±{result.noise.sd:.1%} ({repeats})."
        return text

    def permanently(self, attempt: Attempt) -> str:
        """How to make a change permanent."""
        before, framework = self.result.before, None
        if before is not None and before.trace is not None:
            framework = before.metrics.loader.framework
        return redact_text(permanently(attempt, framework))  # it may be a line of the script

    def sentence(self) -> str:
        """The answer."""
        result, gain = self.result, self.result.gain
        if result.written:
            return f"Ended, because a trial has written to your files: {', '.join(result.written)}."
        if result.kept:
            speeds, kept = "", f"{count_of(len(result.kept), 'change')} kept"
            if self.before is not None and self.after is not None:
                before, after = (in_full(side["samples_per_s"]) for side in (self.before, self.after))
                speeds = f", {before}\u00a0→\u00a0{after} {self.unit}"
            if gain is None:
                return f"{kept} ({result.stopped}){speeds}: not measured as a whole."
            if gain.low <= 1:
                return f"{kept}, but in the end the gain is not sure: {gain}{speeds}."
            return f"Trains {gain.value:.2f}× as fast ({gain.low:.2f} to {gain.high:.2f}){speeds}."
        if result.interrupted:
            return "Interrupted: nothing was kept so far."
        names = ", ".join(dict.fromkeys(in_words(attempt.change) for attempt in result.attempts))
        if names:
            return f"Nothing to change. Tried and not kept: {names} ({result.stopped})."
        if result.untried:
            return f"Nothing was tried: {result.stopped}."
        return f"Nothing to change: nothing was worth trying ({result.stopped})."

    def figures(self) -> list[tuple[str, str, str]]:
        """The figures that are known: name, before → after, remark. Where nothing was kept, as it is."""
        price = self.price or Price(0.0)
        figures: tuple[tuple[str, Callable[[float], str], str], ...] = (
            (self.unit, in_full, "samples_per_s"),
            ("median step", ms, "step_ms"),
            ("SM active", "{:.0f}%".format, "sm_active_pct"),
            ("GPU-Util", "{:.0f}%".format, "gpu_util_pct"),
            ("power", "{:.0f} W".format, "power_w"),
            ("energy a sample", "{:.3g} J".format, "joules_a_sample"),
            ("an epoch", lambda seconds: duration(1e3 * seconds), "epoch_s"),
            ("an epoch costs", price.text, "epoch_money"),
        )
        rows = []
        for label, text, name in figures:
            values = [side[name] for side in (self.before, self.after) if side is not None]
            if values and None not in values:
                rows.append((label, " → ".join(map(text, values)), ""))
        return rows

    def view(self, *, brief: bool) -> ReportView:
        """What a fix says."""
        result, run, both = self.result, self.run, self.comparison
        sections = [ReportSection("kept", "Kept", [self._kept(bundle) for bundle in bundles(self.kept)])]
        if not brief and both is not None:
            sections += [
                ReportSection(
                    "phases", "Where a step's time went, and where it goes", [both.phases("before", "after")]
                ),
                ReportSection("steps", "Step by step (A: before, B: after)", both.plots()),
            ]
        elif not brief and run is not None:
            sections.append(ReportSection("before", "Where the time goes", time_spent(run)))
        withheld = []
        for offer in result.withheld:
            option = offer.changes[0].name.replace("_", "-").partition(":")[0]
            withheld.append(Item(offer.name, lines=[offer.why], to_copy=[f"--allow {option}"]))
        left = [finding_item(run, finding) for finding in self.left if run is not None]
        failed_patch = []
        if self.patch is not None and self.patch.outcome == "failed":
            failed_patch.append(f"Do not use {self.patch.file}, train with the plan: {self.patch.tried}.")
        sections += [
            ReportSection("patch", "The same as a patch", self._as_patch()),
            ReportSection("undone", "Not kept", list(map(_undone, bundles(self.undone)))),
            ReportSection("withheld", "Not tried without your permission", withheld),
            ReportSection("left", "Left to you", left),
            ReportSection("runs", "Runs", [self.runs] if brief else [self._every_run(), self.runs]),
        ]
        return ReportView(
            about=("flatout fix", shlex.join(self.command)),
            headlines=[*failed_patch, self.sentence()],
            notes=result.remarks,
            figures=self.figures(),
            train_with=self.train_with if result.kept else "",
            sections=sections,
        )

    def _kept(self, bundle: Sequence[Attempt]) -> Item:
        learning = dict.fromkeys(attempt.change.note for attempt in bundle if attempt.change.safety == "semantic")
        return Item(
            title=gain_of(bundle),
            code=", ".join(dict.fromkeys(attempt.change.safety for attempt in bundle)),
            where=", ".join(dict.fromkeys(attempt.where for attempt in bundle if attempt.where)),
            lines=[*proofs_of(bundle), *learning],
            copy_as="to make it permanent: ",
            to_copy=[self.permanently(attempt) for attempt in bundle],
        )

    def _as_patch(self) -> list[Item]:
        patch, to_copy = self.patch, []
        if patch is None:
            return []
        lines = [f"{patch.outcome}: {patch.tried}" if patch.tried else patch.outcome]
        if patch.outcome != "passed":
            lines.append("the gain above is that of the plan")
        if patch.by_plan:
            lines.append(f"by flatout.apply, which reads the plan: {all_in_words(patch.by_plan)}")
        if patch.unwritten:
            lines.append(f"not in it, so train with the plan: {all_in_words(patch.unwritten)}")
        failed = patch.outcome == "failed"
        if patch.files and not failed:
            to_copy.append(f"git apply {shlex.quote(str(patch.file))}")
        if redact_command(patch.command) != self.command and not failed:
            to_copy.append(shlex.join(redact_command(patch.command)))
        names = ", ".join(map(str, patch.files))
        return [Item(f"{patch.file}: {names}" if names else "no file to edit", lines=lines, to_copy=to_copy)]

    def _every_run(self) -> Table:
        """Each run with its speed: how the training became faster."""
        fastest = max((trial.speed.value for trial in self.result.trials if trial.speed is not None), default=1.0)
        rows, bars = [], []
        for trial in self.result.trials:
            speed = trial.speed.value if trial.speed is not None else 0.0
            rows.append((trial.what, in_full(speed) if speed else "", duration(1e3 * trial.seconds)))
            bars.append(TableBar(speed / fastest))
        unit = next((trial.speed.unit for trial in self.result.trials if trial.speed is not None), "")
        return Table("", ("run", unit, "took"), rows, bars=bars)

    def to_json(self) -> dict[str, Any]:
        """The documented JSON of `flatout fix --json`."""
        result = self.result
        trials = []
        for trial in result.trials:
            speed = trial.speed.value if trial.speed is not None else None
            trials.append({"what": trial.what, "seconds": trial.seconds, "samples_per_s": speed})
        withheld = []
        for offer in result.withheld:
            changes = [{"name": change.name, "value": change.value} for change in offer.changes]
            withheld.append({"changes": changes, "why": offer.why, "promise": offer.promise})
        return {
            "schema": SCHEMA,
            "command": list(self.command),
            "plan": self.plan_file,
            "sentence": self.sentence(),
            "gain": _as_dict(result.gain),
            "before": self.before,
            "after": self.after,
            "currency": (self.price.sign or None) if self.price is not None else None,
            "kept": [_attempt_to_json(attempt, self.permanently(attempt)) for attempt in self.kept],
            "undone": [_attempt_to_json(attempt) for attempt in self.undone],
            "withheld": withheld,
            "patch": _patch_to_json(self.patch) if self.patch is not None else None,
            "left": [finding_to_json(finding) for finding in self.left],
            "trials": trials,
            "noise": _as_dict(result.noise),
            "remarks": result.remarks,
            "stopped": result.stopped,
            "interrupted": result.interrupted,
            "written": list(result.written),
            "seconds": result.seconds,
        }


# Attempts in words. A bundle is of changes that were measured together and ended alike.


def bundles(attempts: Sequence[Attempt]) -> list[list[Attempt]]:
    """The attempts, bundled."""
    groups: dict[tuple[Any, ...], list[Attempt]] = {}
    for attempt in attempts:
        names = frozenset((in_words(attempt.change), *attempt.together))
        outcome = attempt.outcome
        note = outcome.note * (not attempt.is_kept)
        groups.setdefault((names, attempt.gain, outcome.verdict, note), []).append(attempt)
    return list(groups.values())


def names_of(bundle: Sequence[Attempt]) -> str:
    """The changes of a bundle."""
    return all_in_words(attempt.change for attempt in bundle)


def gain_of(bundle: Sequence[Attempt]) -> str:
    """The changes of a bundle and what they gained."""
    inside = [in_words(attempt.change) for attempt in bundle]
    others = [name for name in bundle[0].together if name not in inside]
    together = f" together with {', '.join(others)}" if others else ""
    return f"{names_of(bundle)}: {bundle[0].gain or 'not measured'}{together}"


def proofs_of(bundle: Sequence[Attempt]) -> list[str]:
    """What each class of change does to training, and how that is known."""
    by_text: dict[str, list[Attempt]] = {}
    for attempt in bundle:
        safety, proof = attempt.change.safety, attempt.outcome.proof
        text = f"{safety}: {proof or SAFETY_IN_WORDS[safety]}"
        if proof.startswith("not proven"):
            text = f"said to be {safety}, {proof}"
        by_text.setdefault(text, []).append(attempt)
    if len(by_text) == 1:
        return list(by_text)
    return [f"{names_of(some)}, {text}" for text, some in by_text.items()]


# From a FixResult


def summarize(result: FixResult, command: Sequence[str], plan_file: str, price: Price | None = None) -> FixSummary:
    """Before and after. Speeds are over all runs, as the gain is; all other figures are of the last run."""
    first, last = _recorded(result.before, "before"), _recorded(result.measured, "after")
    now = last if result.kept else first
    before, after = result.speeds if result.speeds and result.gain is not None else (None, None)
    return FixSummary(
        command=redact_command(command),
        plan_file=plan_file,
        result=result,
        before=_side(result.before, before, price, paused=result.paused),
        after=_side(result.measured, after, price, paused=result.paused),
        left=_left(result, now.findings if now is not None else ()),
        price=price,
        run=last or first,
        comparison=compare(first, last) if first is not None and last is not None else None,
    )


def _recorded(run: Run | None, name: str) -> RecordedRun | None:
    if run is None or run.trace is None or not run.trace.ranks:
        return None
    return run_of(run.trace, name)


def _left(result: FixResult, findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """What still slows training down: there is no change for it, the script has no setting for it, or
    data is still waited for after something that might have helped was tried."""
    ours = {spec.name for spec in CHANGES if spec.family != "pauses" and not spec.advice_only} | result.known
    in_vain = {a.change.name for a in result.attempts if a.gain is None or a.gain.value > MIN_GAIN}
    in_vain -= result.offered | {change.name for change in result.kept}
    left = []
    for finding in findings:
        if finding.gain_high < MIN_GAIN:
            continue
        if finding.change not in ours:
            left.append(finding)
        elif finding.code.startswith("data.") and finding.change in in_vain:
            left.append(dataclasses.replace(finding, advice=f"{finding.advice} (tried, and not kept)"))
    return tuple(left)


def _side(run: Run | None, speed: Speed | None, price: Price | None, *, paused: bool) -> Side | None:
    if run is None or run.trace is None:
        return None
    speed = speed or run.speed
    if speed is None:
        return None
    gpu, epoch_s = run.metrics.machine.gpu, run.epoch_s(speed)
    rate, power_w = speed.value, gpu("power_w").mean
    if paused:
        rate = speed.with_pauses
    if power_w is not None:
        power_w *= len(run.trace.ranks)
    return {
        "samples_per_s": rate,
        "unit": speed.unit,
        "steps": speed.steps,
        "step_ms": run.metrics.step_ms or None,
        "sm_active_pct": gpu("sm_active_pct").mean,
        "gpu_util_pct": gpu("gpu_util_pct").mean,
        "power_w": power_w,
        "joules_a_sample": power_w / rate if power_w is not None and speed.unit == "samples/s" else None,
        "epoch_s": epoch_s,
        "epoch_money": price.of_time(epoch_s) if epoch_s is not None and price is not None else None,
    }


def _undone(bundle: Sequence[Attempt]) -> Item:
    outcome = bundle[0].outcome
    return Item(f"{names_of(bundle)}: {outcome.verdict}", lines=[outcome.note])


def _attempt_to_json(attempt: Attempt, permanently: str | None = None) -> dict[str, Any]:
    outcome = attempt.outcome
    return {
        **dataclasses.asdict(attempt.change),
        "verdict": outcome.verdict,
        "gain": _as_dict(attempt.gain),
        "together": list(attempt.together),
        "before": _as_dict(outcome.before),
        "after": _as_dict(outcome.after),
        "proof": outcome.proof,
        "why": outcome.note,
        "made": attempt.how,
        "where": attempt.where,
        "also": list(attempt.also),
        "permanently": permanently,
    }


def _patch_to_json(patch: FilePatch) -> dict[str, Any]:
    return {
        "file": str(patch.file),
        "edits": list(map(str, patch.files)),
        "command": list(redact_command(patch.command)),
        "by_plan": [change.name for change in patch.by_plan],
        "unwritten": [change.name for change in patch.unwritten],
        "outcome": patch.outcome,
        "tried": patch.tried or None,
    }


def _as_dict(record: Any) -> dict[str, Any] | None:
    return dataclasses.asdict(record) if record is not None else None
