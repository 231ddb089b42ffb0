"""Try, measure, keep or undo; then prove, and measure before against after once more.

    baseline ─► offers ─► a trial of the next offer ─► faster, beyond the noise? ─► kept, and diagnosed again ─┐
                  ▲                                     crashed, hung, no gain ─► undone; a bundle is split     │
                  └──────────────────────────────────────────────────────────────────────────────────────────────┘
    nothing promises more, or the budget is spent ─► what pays nothing is pruned ─► proof ─► before against after

The start-up of a run takes many seconds, so there are few runs: bundles are tried first, and close calls are
repeated last. A change is kept when the interval of its gain lies above 1 and the gain above 2%.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
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
from flatout.fix.proof_runs import ProofRuns, prove
from flatout.fix.result import FixResult, ProgressListener
from flatout.fix.runs import Run, Runner, runs_at_once
from flatout.fix.speed import Speed, pooled
from flatout.fix.trials import FIRST_STEPS, RunHistory, TimeBudget, Trials
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
AT_CEILING = 1.05  # headroom that is not worth another trial
UNSTEADY = 0.08  # noise from run to run that hides small gains


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
        self._pauses_run: Run | None = None  # of all that is kept, with rarer pauses
        self.result = FixResult()
        self._budget = TimeBudget(budget_s, clock)
        self._trials = Trials(runner, self.result, self._budget, self._progress, steps)
        self._history = RunHistory()

    def run(self) -> FixResult:
        """Everything, in order. An interruption or a real write ends it with what is known so far."""
        result = self.result
        try:
            self._measure_baseline()
            self._try_offers()
            self._try_rarer_pauses()
            result.stopped = self._why_stopped()
            result.out_of_time = bool(result.untried or self._close_calls)
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

    def _remark(self, text: str) -> None:
        self.result.remarks.append(text)
        self._progress.say(text)

    # -- the baseline --

    def _measure_baseline(self) -> None:
        steps = self._steps or FIRST_STEPS
        first = self._trials.run("the command as it is", (), known_to=KNOWN_TO, look_below_s=None)
        if not first.is_measured or (first.code != 0 and first.metrics.breakdown.steps < steps):
            raise UsageError(first.why_no_baseline(steps))
        if first.code != 0:
            self._remark(f"the command does not end well without any change: {first.reason()}")
        self._use_as_baseline(first)
        cold = first.metrics.machine.storage_share >= COLD_STORAGE
        hardly_known = first.speed is not None and first.speed.known_to > HARDLY_KNOWN_TO
        # Everything is compared with the baseline, so it is run again where there is time for several more.
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
        """What comes next, how many trials there is time for, and the least budget that makes sense."""
        offered = self._promising(self._view())
        if not offered:
            return "flatout has no change to try for that"
        names = "; ".join(offer.name for offer in offered)
        trial_s = self._budget.run_s(())
        takes = f"to try: {names}. A trial takes about {trial_s:.0f} s"
        least = self._provable_part(offered[0])
        least_s = self._whole_s(least)
        if self._budget.left_s < least_s:
            enough = self._budget.enough_m(least_s)
            ends_s = least_s - self._trying_s(least)
            return (
                f"{takes}, a proof and the last comparison {ends_s:.0f} s: "
                f"--budget {enough}m is the least that makes sense for this command"
            )
        changes = with_changes((), [change for offer in offered for change in offer.changes])
        ends_s = self._trials.reserve_s(changes) + self._trials.compare_s()
        room = max(1, int((self._budget.left_s - ends_s) / trial_s))
        return (
            f"{takes}: there is time for {count_of(room, 'trial')}, the proof and the last comparison ({ends_s:.0f} s)"
        )

    def _whole_s(self, offer: Offer) -> float:
        """The seconds to try an offer, prove it, and measure before and after once more."""
        return self._trials.reserve_s(offer.changes) + self._trials.compare_s() + self._trying_s(offer)

    def _use_as_baseline(self, run: Run) -> None:
        self.result.before = self.result.after = run
        self._history.note((), run)

    # -- which offer is next --

    def _try_offers(self) -> None:
        """Offer after offer, while one promises more and there is time for it and its proof."""
        while True:
            promising = [offer for offer in self._promising(self._view()) if not offer.pauses]
            affordable = [offer for offer in map(self._provable_part, promising) if self._affords(offer)]
            self._trials.expect(len(affordable))
            if affordable:
                self._try(affordable[0])
            elif self._close_calls and self._affords(self._close_calls[0]):
                self._try(self._close_calls.pop(0), again=True)
            else:
                self.result.untried = promising
                return

    def _promising(self, view: View) -> list[Offer]:
        offered, self.result.withheld = offers(view, self._wishes)
        return [offer for offer in offered if offer.promise >= MIN_GAIN]

    def _view(self) -> View:
        run, first = self._trials.after, self._trials.before
        assert run.trace is not None
        assert first.trace is not None
        return View(trace=run.trace, first=first.trace, kept=self.result.kept, tried=self.result.tried)

    def _provable_part(self, offer: Offer) -> Offer:
        """The offer; where there is no time to prove other rounding, without that."""
        quick = tuple(change for change in offer.changes if change.safety != "equivalent")
        if quick and quick != offer.changes and not self._affords(offer):
            return replace(offer, changes=quick)
        return offer

    def _affords(self, offer: Offer) -> bool:
        return self._trials.affords(offer.changes, self._trying_s(offer), compare=offer.promise < PROMISING)

    def _trying_s(self, offer: Offer) -> float:
        if offer.pauses:
            return self._trials.epochs_s(3)
        turns_s = TURNS_S * len(self._decided_in_turns(offer))
        return self._budget.run_s(with_changes(self.result.kept, offer.changes)) + turns_s

    def _why_stopped(self) -> str:
        untried, metrics = self.result.untried, self._trials.after.metrics
        if untried:
            first = untried[0]
            enough = self._budget.enough_m(self._whole_s(first))
            names = ", ".join(offer.name for offer in untried)
            return f"too little time was left to try and prove {names}: --budget {enough}m would do"
        if self._close_calls:
            names = ", ".join(offer.name for offer in self._close_calls)
            return f"too little time was left to look again at {names}"
        if metrics.ceiling is not None and metrics.headroom < AT_CEILING:
            return "at the ceiling of the step itself"
        if self._wishes.only or self._wishes.skip:
            return "nothing of what --only and --skip leave promises more"
        return "nothing promises more"

    # -- one trial --

    def _try(self, offer: Offer, *, again: bool = False) -> None:
        if self._decided_in_turns(offer):
            self._try_in_turns(offer)
        else:
            self._try_as_one(offer, again=again)

    def _try_as_one(self, offer: Offer, *, again: bool = False) -> None:
        run = self._run_trial(offer)
        if self._failed(run):
            # One change may have crashed a bundle of several that are fine.
            if len(offer.parts) > 1:
                self._try_one_by_one(offer, run.reason())
            else:
                self._decide(offer.changes, "unsafe", note=run.reason())
            return
        changes = self._applied(offer.changes, run)
        if changes:
            self._history.note(with_changes(self.result.kept, changes), run)
            self._settle(replace(offer, changes=changes), run, again=again)

    def _decided_in_turns(self, offer: Offer) -> tuple[Change, ...]:
        """Those of its changes that one run decides, by switching them on and off between steps.

        Where steps are slow, a second run is quicker; and several ranks would have to switch together.
        """
        before, step_s = self._trials.before, self._trials.after.step_s
        if before.metrics.rank.info.world_size > 1 or step_s > SLOW_STEP_S:
            return ()
        live = (change for change in offer.changes if change.name in COMPUTE and not change.knob)
        return tuple(change for change in live if BY_NAME[change.name].live)

    def _try_in_turns(self, offer: Offer) -> None:
        """Decide each change to computing in one run, which in the end measures those that pay.

        A data path that goes with them is in force from its start, and kept with any of them or
        judged by itself.
        """
        live = self._decided_in_turns(offer)
        run = self._run_trial(offer, turns=live)
        under_way = {result.name for result in run.turns if result.state == "under way"}
        if self._failed(run) and under_way:  # once more without it
            blamed = [change for change in live if change.name in under_way]
            seen = next((result.note for result in run.turns if result.state == "under way"), "")
            self._decide(blamed, "unsafe", note=seen or run.reason())
            rest = tuple(change for change in offer.changes if change.name not in under_way)
            if rest and self._trials.affords(rest):
                self._try(replace(offer, changes=rest))
            return
        if self._failed(run) or any(result.state != "decided" for result in run.turns) or not run.turns:
            why = run.reason() if run.code else "the run ended before all of them had their turns"
            self._progress.say(f"{offer.name}: {why}. As one")
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
            self.result.kept, self.result.after = plan, run
        elif beside:
            self._settle(replace(offer, changes=beside), run, again=False)

    def _passed_in_turns(self, live: Sequence[Change], run: Run) -> tuple[Change, ...]:
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
        look_below_s = 0.0  # the same work has the same ceiling
        if not offer.only_loads:  # what is slower than what is kept need not be understood
            look_below_s = self._trials.after.step_s_with(offer.changes)
        what = f"{offer.name}, in turns" if turns else offer.name
        return self._trials.run(what, plan, look_below_s=look_below_s, turns=turns)

    def _settle(self, offer: Offer, run: Run, *, again: bool) -> None:
        gained, pays = self._judge(offer, again=again)
        why_not = self._compiling_too_dear(offer.changes, run, gained) if pays else self._why_not_shown(gained, offer)
        if not why_not:
            self._keep(offer, run, gained)
        elif not pays and not again and gained.value > 1 and gained.high >= MIN_GAIN:
            self._close_calls.append(offer)
            self._decide(offer.changes, "undone", gained, note=why_not)
            self._progress.say(f"{offer.name}: to be tried again when nothing else is left")
        elif not pays and offer.worth_splitting and self._trials.affords(offer.changes):
            self._try_one_by_one(offer, str(gained))
        else:
            self._decide(offer.changes, "undone", gained, note=why_not)

    def _judge(self, offer: Offer, *, again: bool) -> tuple[Gain, bool]:
        """The gain of an offer that ran, and whether it pays.

        While the answer is open, the side that has run less often runs again, four times at the most.
        It is open until a repeat has shown the gain, or it is too large for noise, or it cannot reach
        2%. Small gains stay open until nothing else is left to try (`again`).
        """
        kept, new = self.result.kept, with_changes(self.result.kept, offer.changes)
        repeats = 0
        while True:
            gained = self._history.gain(kept, new)
            runs = [len(self._history.speeds(plan)) for plan in (kept, new)]
            shown = gained.low > 1 and gained.value > MIN_GAIN
            # Without time for a repeat, an interval above 1 has to do: the last comparison has to agree.
            if gained.high < MIN_GAIN or repeats == MOST_REPEATS or not self._trials.affords(offer.changes):
                return gained, shown
            believed = shown and (gained.value > BELIEVED_AT_ONCE or max(runs) > 1)
            if believed or (gained.value < PROMISING and not again):
                return gained, believed
            repeats += 1
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
        self.result.after = run
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
        self.result.write_down(changes, verdict, gained, note=note, run=run, before=before)
        line = f"{all_in_words(changes)}: {verdict}"
        if note:
            line += f": {note}"
        elif gained is not None:
            line += f", {gained}"
        self._progress.say(line)

    # -- evaluation and checkpoints --

    def _try_rarer_pauses(self) -> None:
        """A run over an epoch shows how long pauses take, one over two that some are left out; the
        gain is arithmetic.

        Two epochs, because a script may evaluate after the first in any case.
        """
        view, kept, run = self._view(), self.result.kept, self._trials.after
        permitted = any(self._wishes.permits(Change(name=name, value=0, safety="semantic")) for name in PAUSES)
        if not permitted or not pause_knobs(view):
            return
        epoch = self._trials.epoch_steps()
        unseen = epoch is not None and epoch > run.metrics.breakdown.steps
        if unseen and self._trials.affords(seconds=self._trials.epochs_s(3)):
            unseen, longer = False, self._trials.run("a run for its pauses", kept, steps=epoch)
            if self._failed(longer):
                self._remark(f"its pauses could not be looked at: {longer.reason()}")
            else:
                run = longer
        assert run.trace is not None
        offer = next((one for one in self._promising(replace(view, trace=run.trace)) if one.pauses), None)
        if offer is not None and not unseen and self._trials.affords(offer.changes, self._trials.epochs_s(2)):
            self._history.look_at_pauses(run)
            self._try_pauses(offer, epoch)
        elif offer is not None:
            self.result.untried.append(offer)

    def _try_pauses(self, offer: Offer, epoch: int | None) -> None:
        kept, before = self.result.kept, self._trials.after.speed
        what = f"{offer.name}, two epochs" if epoch else offer.name
        run = self._trials.run(what, with_changes(kept, offer.changes), steps=epoch and 2 * epoch)
        if self._failed(run):
            self._decide(offer.changes, "unsafe", note=run.reason())
            return
        changes = self._applied(offer.changes, run)
        if not changes:
            return
        if not self._history.pauses_are_rarer(run, changes):
            self._decide(changes, "undone", note="in a trial there are as many pauses as before")
            return
        plan = with_changes(kept, changes)
        self._history.note(plan, run)
        gained = self._history.gain(kept, plan)
        if gained.low > 1 and gained.value > MIN_GAIN:
            self.result.kept, self._pauses_run = plan, run
            self._decide(changes, "kept", gained, run=run, before=before)
        else:
            self._decide(changes, "undone", gained, note=self._why_not_shown(gained, offer))

    # -- what pays nothing in company --

    def _prune(self) -> None:
        """Take out what changes rounding and was kept in a bundle, one by one: each has to pay for itself."""
        unknown = []
        for attempt in list(self.result.attempts):
            change = attempt.change
            if change not in self.result.kept or not attempt.together or change.safety != "equivalent":
                continue
            if not self._trials.affords((change,)):
                unknown.append(in_words(change))
                continue
            without = tuple(other for other in self.result.kept if other.name != change.name)
            run = self._trials.run(f"without {in_words(change)}", without)
            if self._failed(run):
                continue
            self._history.note(without, run)
            alone = self._history.gain(without, self.result.kept)
            if alone.value >= MIN_GAIN:
                attempt.gain, attempt.together = alone, ()
                self._progress.say(f"{in_words(change)} alone: {alone}")
            else:
                self.result.kept, self.result.after, self._pauses_run = without, run, None
                self._decide((change,), "undone", alone, note=f"{alone}: brings nothing beside the others")
        if unknown:
            self._remark(f"no time to see what each brings alone: {', '.join(unknown)}")

    # -- proof --

    def _prove(self) -> None:
        if all(change.safety == "semantic" for change in self.result.kept):
            return
        if self._budget.left_s <= 0:
            self.result.out_of_time = True
            self._drop_unproven("the budget was spent before the proof")
            return
        runs = ProofRuns(
            make=self._trials.prove,
            # One process has to be sure of the GPU's memory: where two have no room, they run in turn.
            side_by_side=runs_at_once(self._trials.before, self._trials.after) > 1,
            has_time=lambda: self._budget.left_s > 0,
            say=self._progress.say,
        )
        for changes, proof in prove(runs, self.result.kept):
            for change in changes:
                if proof.holds:
                    self._note_proof(change, proof.text)
                else:
                    self.result.drop(change, f"{proof.standing}: {proof.text}")
            self._progress.say(f"proof, {all_in_words(changes)}: {proof.standing} ({proof.text})")
        self.result.out_of_time |= self._budget.left_s <= 0

    def _note_proof(self, change: Change, text: str) -> None:
        attempt = self.result.attempt_at(change)
        attempt.outcome = replace(attempt.outcome, proof=text)

    def _drop_unproven(self, why: str) -> None:
        """Other rounding without a proof is not kept; the rest stays, and says so."""
        for change in self.result.kept:
            proven = self.result.attempt_at(change).outcome.proof
            if change.safety == "equivalent" and not proven:
                self.result.drop(change, f"not proven: {why}")
            elif change.safety != "semantic" and not proven:
                self._note_proof(change, f"not proven: {why}")

    # -- before against after --

    def _compare_before_and_after(self) -> None:
        kept = self.result.kept
        if not kept:
            return
        fresh: list[Speed] = []
        measured, left_s = bool(self._history.speeds(kept)), self._budget.left_s
        only_pauses = all(change.name in PAUSES for change in kept)  # the rest is arithmetic
        if not only_pauses and (self._trials.compare_s() < left_s or (not measured and left_s > 0)):
            self._trials.measure_afresh()
            old = self._trials.run("the command as it was, again", ())
            new = self._trials.run("with all that was kept", kept)
            # A run that only the budget has ended says nothing against what was proven.
            if self._failed(new) and not (new.hung and self._budget.left_s <= 0):
                self._drop_all(f"failed: with all that was kept, {new.reason()}")
                return
            if not self._failed(new) and not self._failed(old):
                fresh = self._note_last_runs(old, new)
        elif measured:
            self.result.after = self._pauses_run or self._trials.after
            if not only_pauses:
                self.result.out_of_time = True
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
        result.paused = any(change.name in PAUSES for change in kept)
        if result.paused:
            result.speeds = self._history.counting_pauses(()), self._history.counting_pauses(kept)
        else:
            result.speeds = pooled(self._history.speeds(())), pooled(self._history.speeds(kept))
        if self._trials.after.short_epoch:
            self._remark(self._trials.after.short_epoch)
        self._progress.say(f"before → after: {gained}")
        # What was kept was picked for how fast it looked: the last runs have to agree, or all of them
        # be sure.
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
