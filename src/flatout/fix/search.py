"""Try, measure, keep or undo; then prove, and measure before against after once more.

    baseline ─► offers ─► a trial of the next offer ─► faster, beyond the noise? ─► kept, and diagnosed again ─┐
                  ▲                                     crashed, hung, no use ─► undone; a bundle is taken apart │
                  └──────────────────────────────────────────────────────────────────────────────────────────────┘
    nothing promises more, or the budget is spent ─► what pays nothing is pruned ─► proof ─► before against after

A run costs its start-up first of all (many seconds with torch on a GPU machine), so there are few of
them: bundles are tried first, and close calls are repeated when nothing else is left to try. A change is
kept when the interval of its gain lies above 1 and the gain above 2%.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import replace

from flatout.fix.offers import (
    COMPUTE,
    LOADED_BY_HAND,
    PAUSES,
    Offer,
    View,
    Wishes,
    all_in_words,
    in_words,
    offers,
    pause_knobs,
    scaled_twice,
    with_changes,
)
from flatout.fix.proof_runs import ProofRunner, ProofVerdict, prove
from flatout.fix.result import FixResult, ProgressListener
from flatout.fix.runs import Run, Runner, runs_at_once
from flatout.fix.speed import Speed, pooled
from flatout.fix.time_budget import TimeBudget
from flatout.fix.trials import FIRST_STEPS, RunHistory, Trials
from flatout.model.changes import BY_NAME
from flatout.model.errors import RealWriteError, UsageError
from flatout.model.formatting import count_of
from flatout.model.plan import Change, Verdict
from flatout.model.stats import MIN_GAIN, ONE_RUN, Gain, gain

KNOWN_TO = 0.02  # how well the baseline should be known …
HARDLY_KNOWN_TO = 0.05  # … and when it is run once more
COLD_STORAGE = 0.05  # of the time spent waiting for storage: the page cache is not warm yet
BELIEVED_AT_ONCE = 1.25  # a gain that is believed before any run was repeated
MOST_REPEATS = 4  # of runs, for a close call
PROMISING = 1.15  # this much is settled at once, and may take the time of the last comparison
SLOW_STEP_S = 0.5  # a step for which turns take longer than a second run
TURNS_S = 5.0  # of a change, as a rule
DRIFT = 0.05  # of the machine, from the first run to the last, that deserves a remark
AT_CEILING = 1.05  # times as fast, and no more, it would be with its data at hand
UNSTEADY = 0.08  # from run to run: what few repeats cannot see through


class Search:
    """A fix under way."""

    def __init__(
        self,
        runner: Runner,
        wishes: Wishes,
        *,
        budget_s: float,
        steps: int | None = None,
        progress: ProgressListener | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wishes = wishes
        self._steps = steps
        self._progress = progress or ProgressListener()
        self._close_calls: list[Offer] = []  # may be gains: run again when nothing else is left
        self._epoch_run: Run | None = None  # of what is kept, over more than an epoch
        self.result = FixResult()
        self._budget = TimeBudget(budget_s, clock)
        self._trials = Trials(runner, self.result, self._budget, self._progress, steps)
        self._history = RunHistory()
        self._remark = self._trials.remark

    def run(self) -> FixResult:
        """Everything, in order. An interruption or a real write ends it with what is known so far."""
        result = self.result
        try:
            self._measure_baseline()
            self._try_offers()
            self._prune()
            self._prove()
            self._compare_before_and_after()
        except KeyboardInterrupt:
            result.stopped, result.interrupted = "interrupted", True
            self._drop_unproven("interrupted before the proof")
        except RealWriteError as problem:
            result.stopped, result.written = "a trial has written to your files", problem.files
            self._drop_unproven("ended before the proof")
        result.seconds = self._budget.spent_s
        result.noise = noise = self._history.noise
        if noise.repeats and noise.sd > UNSTEADY:
            self._remark(f"runs of the same plan vary by ±{noise.sd:.0%}: a gain below that may not have shown")
        return result

    # -- the baseline --

    def _measure_baseline(self) -> None:
        steps = self._steps or FIRST_STEPS
        first = self._trials.run("the command as it is", (), known_to=KNOWN_TO, look_below_s=None)
        if not first.is_measured or (first.code != 0 and first.metrics.breakdown.steps < steps):
            raise UsageError(first.why_no_baseline(steps))
        if first.code != 0:
            self._remark(f"the command does not end well without any change: {first.reason()}")
        self._use_as_baseline(first)
        cold = first.metrics.storage_share >= COLD_STORAGE
        hardly_known = first.speed is not None and first.speed.known_to > HARDLY_KNOWN_TO
        # Everything is compared with the baseline, so a second run of it pays where there is time for
        # several more.
        if self._steps is None and self._budget.left_s > 5 * first.seconds and (cold or hardly_known):
            again = self._trials.run("the command once more", (), look_below_s=None)
            if again.is_measured:
                if cold:
                    self._remark("the first run read from a cold disk, and does not count")
                    self._history.forget_speeds()
                self._use_as_baseline(again)
        findings = self._view().findings
        title = findings[0].title if findings else "nothing wrong was found"
        self._progress.say(f"{self._trials.before.speed}: {title}")
        self._progress.say(self._what_fits())

    def _what_fits(self) -> str:
        """How many trials there is time for; where there is none, the least budget that makes sense."""
        trial_s = self._budget.run_s(())
        others_s = self._trials.reserve_s() + self._trials.compare_s()  # the proof, and before and after once more
        room = int((self._budget.left_s - others_s) / trial_s)
        if room < 1:
            return (
                f"a trial takes about {trial_s:.0f} s, and a proof and the last comparison {others_s:.0f} s: "
                f"--budget {self._budget.enough_m(others_s + trial_s)}m is the least that makes sense"
            )
        fit = count_of(room, "trial")
        return f"a trial takes about {trial_s:.0f} s: there is time for {fit}, the proof and the last comparison"

    def _use_as_baseline(self, run: Run) -> None:
        self.result.before = self.result.after = run
        self._history.note((), run)

    # -- which offer is next --

    def _try_offers(self) -> None:
        """Offer after offer, while one promises more and there is time for it and its proof."""
        while True:
            view = self._view()
            offered, self.result.withheld = offers(view, self._wishes)
            promising = [offer for offer in offered if offer.promise >= MIN_GAIN]
            affordable = [offer for offer in map(self._provable_part, promising) if self._affords(offer)]
            self._trials.expect(len(affordable))
            # What costs a whole epoch, and what may be nothing but noise, waits until nothing else is
            # affordable.
            if affordable:
                self._try(affordable[0])
            elif self._may_look_at_an_epoch(view):
                self._look_at_an_epoch()
            elif self._close_calls and self._affords(self._close_calls[0]):
                self._try(self._close_calls.pop(0), again=True)
            else:
                self.result.untried = promising
                self.result.stopped = self._why_stopped(view, promising)
                return

    def _view(self) -> View:
        run, first = self._epoch_run or self._trials.after, self._trials.before
        assert run.trace is not None
        assert first.trace is not None
        return View(trace=run.trace, first=first.trace, kept=self.result.kept, tried=self.result.tried)

    def _provable_part(self, offer: Offer) -> Offer:
        """The offer; where there is no time to prove other rounding, without that."""
        quick = tuple(change for change in offer.changes if change.safety != "equivalent")
        if quick and offer.splits and not self._affords(offer):
            return replace(offer, changes=quick)
        return offer

    def _affords(self, offer: Offer) -> bool:
        """Whether there is time for a trial, its proof and, if it promises little, the last comparison."""
        return self._trials.affords(offer.changes, self._trying_s(offer), compare=offer.promise < PROMISING)

    def _trying_s(self, offer: Offer) -> float:
        """What a trial takes; one of pauses takes two epochs, and another one to be compared with."""
        if not offer.pauses:
            turns_s = TURNS_S * len(self._decided_in_turns(offer))
            return self._budget.run_s(with_changes(self.result.kept, offer.changes)) + turns_s
        looked = self._history.knows_pauses or self._epoch_to_look_at() is None
        return self._trials.epochs_s(2) + (0.0 if looked else self._trials.epochs_s(1))

    def _why_stopped(self, view: View, promising: Sequence[Offer]) -> str:
        if promising:
            first = promising[0]
            enough = self._budget.enough_m(
                self._trials.reserve_s(first.changes) + self._trials.compare_s() + self._trying_s(first)
            )
            names = ", ".join(offer.name for offer in promising)
            return f"too little time was left to try and prove {names}: --budget {enough}m would do"
        if self._close_calls:
            names = ", ".join(offer.name for offer in self._close_calls)
            return f"too little time was left to look again at {names}"
        if view.metrics.ceiling is not None and view.metrics.headroom < AT_CEILING:
            return "at the ceiling of the step itself"
        if self._wishes.only or self._wishes.skip:
            return "nothing of what --only and --skip leave promises more"
        return "nothing promises more"

    # -- one trial --

    def _try(self, offer: Offer, *, again: bool = False) -> None:
        if self._decided_in_turns(offer):
            self._try_in_turns(offer)
            return
        if offer.pauses and not self._history.knows_pauses:
            self._look_at_an_epoch()
        self._try_as_one(offer, again=again)

    def _try_as_one(self, offer: Offer, *, again: bool = False) -> None:
        """A run with all its changes, compared with other runs."""
        run = self._run_trial(offer)
        if self._failed(run):
            # One change may have crashed a bundle of several that are fine.
            if offer.splits:
                self._try_one_by_one(offer, run.reason())
            else:
                self._decide(offer.changes, "unsafe", note=run.reason())
            return
        changes = self._applied(offer.changes, run)
        if not changes:
            return
        if offer.pauses and not self._history.pauses_are_rarer(run, changes):
            self._decide(changes, "undone", note="in a trial there are as many pauses as before")
            return
        self._history.note(with_changes(self.result.kept, changes), run)
        self._settle(replace(offer, changes=changes), run, again=again)

    def _decided_in_turns(self, offer: Offer) -> tuple[Change, ...]:
        """Those of its changes that one run decides, by switching them on and off between steps.

        Where steps are slow, a second run is the quicker way; and several ranks would have to switch together."""
        before, step_s = self._trials.before, self._trials.after.step_s
        if before.metrics.rank.info.world_size > 1 or step_s > SLOW_STEP_S:
            return ()
        live = (change for change in offer.changes if change.name in COMPUTE and not change.knob)
        return tuple(change for change in live if BY_NAME[change.name].live)

    def _try_in_turns(self, offer: Offer) -> None:
        """Decide each change to computing in one run, which in the end measures what has passed.

        A data path that goes with them is in force from its start, and kept with any of them or judged by itself.
        """
        live = self._decided_in_turns(offer)
        run = self._run_trial(offer, turns=live)
        under_way = {result.name for result in run.turns if result.state == "under way"}
        if self._failed(run) and under_way:  # once more without it
            self._decide(_named(live, under_way), "unsafe", note=run.reason())
            rest = tuple(change for change in offer.changes if change.name not in under_way)
            if rest and self._trials.affords(rest):
                self._try(replace(offer, changes=rest))
            return
        if self._failed(run) or any(result.state != "decided" for result in run.turns) or not run.turns:
            self._progress.say(f"{offer.name}: the run ended before all of them had their turns. As one")
            self._try_as_one(offer)
            return
        passed = self._passed_in_turns(live, run)
        beside = self._applied([change for change in offer.changes if change not in live], run)
        plan = with_changes(self.result.kept, (*beside, *passed))
        run = replace(run, changes=plan)  # the others were off when its speed was measured
        self._history.note(plan, run)
        if passed:
            if beside:
                gained = self._history.gain(self.result.kept, plan)
                self._decide(beside, "kept", gained, note=f"together with {all_in_words(passed)}", run=run)
            self.result.kept, self.result.after, self._epoch_run = plan, run, None
        elif beside:
            self._settle(replace(offer, changes=beside), run, again=False)

    def _passed_in_turns(self, live: Sequence[Change], run: Run) -> tuple[Change, ...]:
        """Those that turns have shown to pay; what became of each is written down."""
        passed = []
        for change, result in zip(live, run.turns, strict=True):
            if result.note:
                self._decide((change,), "not applicable", note=result.note)
            elif result.decision == "faster":
                passed.append(change)
                self._decide((change,), "kept", result.gain, run=run)
            else:
                note = f"{result.gain}: {result.decision}, in {result.rounds} rounds of turns"
                self._decide((change,), "undone", result.gain, note=note)
        return tuple(passed)

    def _run_trial(self, offer: Offer, turns: Sequence[Change] = ()) -> Run:
        plan = with_changes(self.result.kept, offer.changes)
        epoch = self._trials.epoch_steps()
        if offer.pauses and epoch is not None:  # after the first one a script may evaluate in any case
            return self._trials.run(f"{offer.name}, two epochs", plan, steps=2 * epoch)
        look_below_s = 0.0  # the same work has the same ceiling
        if not offer.only_loads:  # what is slower than what is kept need not be understood
            look_below_s = self._trials.after.step_s_with(offer.changes)
        what = f"{offer.name}, in turns" if turns else offer.name
        return self._trials.run(what, plan, look_below_s=look_below_s, turns=turns)

    def _settle(self, offer: Offer, run: Run, *, again: bool) -> None:
        """Keep or undo what a trial has shown to run, or leave it for the end."""
        gained, pays = self._judge(offer, again=again)
        why_not = self._why_not_shown(gained, offer)
        if pays:
            why_not = self._compiling_too_dear(offer.changes, run, gained)
        if not why_not:
            self._keep(offer, run, gained)
            return
        if not pays and not again and gained.value > 1 and gained.high >= MIN_GAIN:
            self._close_calls.append(offer)
        elif not pays and offer.worth_splitting and self._trials.affords(offer.changes):
            self._try_one_by_one(offer, str(gained))
            return
        self._decide(offer.changes, "undone", gained, note=why_not)

    def _judge(self, offer: Offer, *, again: bool) -> tuple[Gain, bool]:
        """The gain of an offer that ran, and whether it pays.

        One rule for repeats: while the answer is open, the side that has run less often runs again, four
        times at the most. It is open until a repeat has shown the gain, or it is too large for noise, or it
        cannot reach 2%. Small gains stay open until nothing else is left to try (`again`).
        """
        kept, new = self.result.kept, with_changes(self.result.kept, offer.changes)
        repeats = 0
        while True:
            gained = self._history.gain(kept, new)
            runs = [len(self._history.speeds(plan)) for plan in (kept, new)]
            shown = gained.low > 1 and gained.value > MIN_GAIN
            # Without time for a repeat, an interval above 1 has to do: the last comparison still has to
            # agree.
            if gained.high < MIN_GAIN or repeats == MOST_REPEATS or not self._trials.affords(offer.changes):
                return gained, shown
            # How long evaluation and checkpoints take was measured: that they are rarer is arithmetic.
            believed = shown and (offer.pauses or gained.value > BELIEVED_AT_ONCE or max(runs) > 1)
            if believed or (gained.value < PROMISING and not again):
                return gained, believed
            repeats += 1
            # A mean is as sure as its smaller side.
            plan, what = new, offer.name
            if runs[0] <= runs[1]:
                plan, what = kept, "what is kept" if kept else "the command as it was"
            self._history.note(plan, self._trials.run(f"{what}, again ({gained} is close)", plan))

    def _why_not_shown(self, gained: Gain, offer: Offer) -> str:
        if gained.high < 1:
            return f"{gained}: slower"
        shown = "too little to be believed of so few runs" if gained.low > 1 else "no gain over 2% was shown"
        if gained.value > MIN_GAIN and not self._trials.affords(offer.changes):
            shown += ", and what time is left is for proof and comparison"
        return f"{gained}: {shown}"

    def _compiling_too_dear(self, changes: Sequence[Change], run: Run, gained: Gain) -> str:
        """Why compiling does not pay in the whole training; empty where it does, or that is not known."""
        extra_s = run.start_s - self._trials.after.start_s
        compiles = any(change.name == "compile" for change in changes)
        if not compiles or run.speed is None or not run.metrics.loader.batch_size or extra_s <= 0:
            return ""
        pays_after = extra_s / ((gained.value - 1) / run.speed.value)
        cost = f"compiling takes {extra_s:.0f} s and pays after {pays_after:,.0f} samples"
        planned = run.planned_samples
        if planned is not None and pays_after > planned:
            return f"{cost}, more than the {planned:,.0f} of the whole training"
        self._remark(cost)
        return ""

    def _try_one_by_one(self, offer: Offer, why: str) -> None:
        self._progress.say(f"{offer.name}: {why}. One by one")
        for part in offer.parts:
            if self._trials.affords(part.changes):
                self._try(part)
            else:
                self._decide(part.changes, "undone", note="the budget was spent before it could be tried alone")

    def _failed(self, run: Run) -> bool:
        return not run.is_measured or run.code not in (0, self._trials.before.code)

    def _applied(self, changes: Sequence[Change], run: Run) -> tuple[Change, ...]:
        """Those that were really made in the run; of the others it is written down why not."""
        applied = []
        for change in changes:
            refused = run.why_not_applied(change) or scaled_twice(change, self._trials.before.metrics, run.metrics)
            if refused:
                self._decide((change,), "not applicable", note=refused)
            else:
                applied.append(change)
        return tuple(applied)

    def _keep(self, offer: Offer, run: Run, gained: Gain) -> None:
        changes, names = offer.changes, {change.name for change in offer.changes}
        earlier, self.result.kept = self.result.kept, with_changes(self.result.kept, changes)
        # An epoch has pauses in its steps; what a usual run takes is not seen in it.
        if offer.pauses:
            self._epoch_run = run
        else:
            self._epoch_run, self.result.after = None, run
        # The elastic loader finds its own number of workers: one set by hand is no longer a question.
        if "loader" in names:
            self._close_calls = [o for o in self._close_calls if not {c.name for c in o.changes} <= LOADED_BY_HAND]
        for change in earlier:
            if change not in self.result.kept and change.name not in names:
                self._decide((change,), "undone", note=f"{all_in_words(changes)} takes its place")
        self._decide(changes, "kept", gained, run=run, before=self._history.speeds(earlier)[-1])

    def _decide(
        self,
        changes: Sequence[Change],
        verdict: Verdict,
        gained: Gain | None = None,
        *,
        note: str = "",
        run: Run | None = None,
        before: Speed | None = None,
    ) -> None:
        """Write down what became of some changes, and say it."""
        self.result.write_down(changes, verdict, gained, note=note, run=run, before=before)
        line = f"{all_in_words(changes)}: {verdict}"
        if note:
            line += f": {note}"
        elif gained is not None:
            line += f", {gained}"
        self._progress.say(line)

    # -- evaluation and checkpoints --

    def _may_look_at_an_epoch(self, view: View) -> bool:
        """Whether pauses may come less often, no trial has seen them yet, and a longer one is affordable."""
        permitted = any(self._wishes.permits(Change(name=name, value=0, safety="semantic")) for name in PAUSES)
        if self._history.knows_pauses or not permitted or not pause_knobs(view):
            return False
        if self._epoch_to_look_at() is None:
            return False
        return self._trials.affords(seconds=self._trials.epochs_s(1) + self._trials.epochs_s(2))

    def _epoch_to_look_at(self) -> int | None:
        """The steps of an epoch, where the latest run of what is kept has had fewer."""
        steps = self._trials.epoch_steps()
        longer = steps is not None and steps > self._trials.after.metrics.breakdown.steps
        return steps if longer else None

    def _look_at_an_epoch(self) -> None:
        steps, run = self._epoch_to_look_at(), self._trials.after
        if steps is not None:
            run = self._trials.run("a run for its pauses", self.result.kept, steps=steps)
            if self._failed(run):
                self._remark(f"its pauses could not be looked at: {run.reason()}")
                run = self._trials.after
        self._history.look_at_pauses(run)
        self._epoch_run = run

    # -- what pays nothing in company --

    def _prune(self) -> None:
        """Take out what changes rounding and was kept in a bundle, one by one: each has to pay for itself."""
        unknown = []
        for attempt in list(self.result.attempts):
            change = attempt.change
            if change not in self.result.kept or not attempt.together or change.safety != "equivalent":
                continue
            if not self._trials.affords((change,)):
                unknown.append(change)
                continue
            without = tuple(other for other in self.result.kept if other.name != change.name)
            run = self._trials.run(f"without {in_words(change)}", without)
            if self._failed(run):
                continue
            self._history.note(without, run)
            alone = self._history.gain(without, self.result.kept)
            if alone.value >= MIN_GAIN:
                self.result.amend(attempt, gain=alone, together=())
                self._progress.say(f"{in_words(change)} alone: {alone}")
            else:
                self.result.kept = without
                self.result.after, self._epoch_run = run, None
                self._decide((change,), "undone", alone, note=f"{alone}: brings nothing beside the others")
        if unknown:
            self._remark(f"no time to see what each brings alone: {', '.join(map(in_words, unknown))}")

    # -- proof --

    def _prove(self) -> None:
        if all(change.safety == "semantic" for change in self.result.kept):
            return
        if self._budget.left_s <= 0:
            self._drop_unproven("the budget was spent before the proof")
            return
        runner = ProofRunner(
            run=self._trials.prove,
            # One process has to be sure of the GPU's memory: where two have no room, they run one after the
            # other.
            side_by_side=runs_at_once(self._trials.before, self._trials.after) > 1,
            has_time=lambda: self._budget.left_s > 0,
            say=self._progress.say,
        )
        for verdict in prove(runner, self.result.kept):
            self._apply(verdict)

    def _apply(self, verdict: ProofVerdict) -> None:
        """Write a proof down; what has none is dropped."""
        proof = verdict.proof
        for change in verdict.changes:
            attempt = self.result.attempt_at(change)
            if proof.holds:
                self.result.amend(attempt, outcome=replace(attempt.outcome, proof=proof.text))
            else:
                self.result.drop(change, f"{proof.standing}: {proof.text}")
        self._progress.say(f"proof, {all_in_words(verdict.changes)}: {proof.standing} ({proof.text})")

    def _drop_unproven(self, why: str) -> None:
        """Other rounding without a proof is not kept; the rest stays, and says so."""
        for change in self.result.kept:
            attempt = self.result.attempt_at(change)
            if attempt.outcome.proof or change.safety == "semantic":
                continue
            if change.safety == "equivalent":
                self.result.drop(change, f"not proven: {why}")
            else:
                self.result.amend(attempt, outcome=replace(attempt.outcome, proof=f"not proven: {why}"))

    # -- before against after --

    def _compare_before_and_after(self) -> None:
        """The headline: both sides once more, since the machine may have changed meanwhile."""
        kept = self.result.kept
        if not kept:
            return
        fresh: list[Speed] = []
        measured, left_s = bool(self._history.speeds(kept)), self._budget.left_s
        only_pauses = all(change.name in PAUSES for change in kept)  # the rest is arithmetic
        if not only_pauses and (self._trials.compare_s() < left_s or (not measured and left_s > 0)):
            old = self._trials.run("the command as it was, again", ())
            new = self._trials.run("with all that was kept", kept)
            # A run that only the budget has ended says nothing against what was proven.
            if self._failed(new) and not (new.hung and self._budget.left_s <= 0):
                self._drop_all(f"failed: with all that was kept, {new.reason()}")
                return
            if not self._failed(new) and not self._failed(old):
                fresh = self._note_last_runs(old, new)
        elif measured:
            self.result.after = self._epoch_run or self._trials.after
            if not only_pauses:
                self._remark("no time was left to measure before and after once more: the gain is that of the trials")
        if self._history.speeds(kept):
            self._conclude(fresh)
        else:  # interrupted in between, or a proof has taken something away
            self._remark("what was kept in the end was not measured as a whole")

    def _note_last_runs(self, old: Run, new: Run) -> list[Speed]:
        assert old.speed is not None
        assert new.speed is not None
        drift = old.speed.value / self._history.speeds(())[0].value
        if abs(math.log(drift)) > DRIFT:
            self._remark(f"the machine drifted: the command as it was ran at {drift:.2f}× its first speed")
        self.result.before, self.result.after = old, new
        self._history.note((), old)
        self._history.note(self.result.kept, new)
        return [old.speed, new.speed]

    def _conclude(self, fresh: list[Speed]) -> None:
        """The gain of all that was kept, over all runs; `fresh`: the last one of each side.

        Both sides were measured early and late, so that a machine that drifts treats them alike.
        """
        result, kept = self.result, self.result.kept
        result.gain = gained = self._history.gain((), kept)
        result.speeds = pooled(self._history.speeds(())), pooled(self._history.speeds(kept))
        result.paused = any(change.name in PAUSES for change in kept)
        if result.paused:
            result.speeds = self._history.counting_pauses(()), self._history.counting_pauses(kept)
        self._remark(self._trials.after.short_epoch)
        self._progress.say(f"before → after: {gained}")
        # What was kept was picked for how fast it looked: the last runs have to agree, or all of them be
        # sure.
        confirmed = gained.low > 1
        if fresh:
            confirmed = gain(fresh[:1], fresh[1:], ONE_RUN).value >= 1
        if gained.value < MIN_GAIN or not confirmed:
            self._drop_all(f"not confirmed: {gained} in the end, with all that was kept")

    def _drop_all(self, why: str) -> None:
        for change in self.result.kept:
            self.result.drop(change, why)
        self.result.gain = None
        self._remark("what had been kept was not confirmed by the last comparison, and was dropped")


def _named(changes: Sequence[Change], names: Container[str]) -> tuple[Change, ...]:
    return tuple(change for change in changes if change.name in names)
