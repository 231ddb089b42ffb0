"""Try, measure, keep or undo; then prove, and measure before against after once more.

    baseline ─► offers ─► run with one offer more ─► faster, beyond the noise? ─► kept, and diagnosed anew ─┐
                  ▲                                   crashed, hung, no use ─► undone; a bundle is taken apart │
                  └────────────────────────────────────────────────────────────────────────────────────────┘
    nothing promises more, or the budget is spent ─► what pays nothing is pruned ─► proof ─► headline

A run costs its start-up first of all (many seconds with torch on a GPU machine), so the number of runs is what is
saved: bundles first, repeats only for close calls, when nothing else is left to try. A change is kept when the interval
of its gain lies above 1 and the gain above 2%.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from flatout.diagnose.rules import diagnose
from flatout.fix.offers import (
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
from flatout.fix.pauses import Pauses, may_be_changed
from flatout.fix.proof import Proof
from flatout.fix.proof_runs import Proving
from flatout.fix.result import FixResult, ProgressListener, RunRecord
from flatout.fix.runs import ProofRun, Run, Runner, seen_like
from flatout.fix.speed import (
    Speed,
    gain_of_rarer_pauses,
    pooled,
    slower_pauses,
    with_equal_steps,
)
from flatout.fix.speeds import Speeds
from flatout.fix.time_budget import TimeBudget, compiling
from flatout.launch.protocol import MOST_STEPS
from flatout.model.errors import RealWriteError, UsageError
from flatout.model.plan import Change, Figure, Verdict
from flatout.model.stats import MIN_GAIN, ONE_RUN, USUAL_RUN_NOISE, Gain, gain
from flatout.trace import Trace

FIRST_STEPS = 48
STEADY_NOISE = 0.01  # from run to run, of a GPU that waits for nothing
KNOWN_TO = 0.02  # how well the baseline is to be known …
HARDLY_KNOWN_TO = 0.05  # … and when it is measured once more
MEASURE_S = 6.0  # of training in a trial
CLEAR = 1.25  # a gain that is believed before any run was repeated …
CLEAR_IN_COMPANY = 2.0  # … and where others use the machine
CLOSE_CALLS = 4  # runs more that a close call may take, the side with fewer of them first
PROMISING = 1.15  # what hopes for more may take the time of the last comparison: both sides were measured before
DRIFT = 0.05
DRIFT_OF_AN_EPOCH = 0.2  # whose start and end a trial does not have
AT_CEILING = 1.05  # times as fast, and no more, it would be with its data at hand
UNSTEADY = 0.08  # from run to run: what few repeats cannot see through
COLD = 0.05  # of the time spent waiting for storage: the page cache is not warm yet


class Search:
    """A fix under way."""

    def __init__(
        self,
        run: Runner,
        wishes: Wishes,
        *,
        budget_s: float,
        steps: int | None = None,
        progress: ProgressListener | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start = run
        self._wishes = wishes
        self._steps = steps
        self._progress = progress or ProgressListener()
        self._speeds = Speeds()
        self._clear = CLEAR
        self._undecided: list[Offer] = []  # looked like a gain, and could not be told from noise: once more, at the end
        self._long: Run | None = None  # what was kept, over more than an epoch
        self._sight: Trace | None = None  # of what was kept, with the latest X-ray and ceiling there are
        self.found = FixResult()
        self._purse = TimeBudget(self.found, budget_s, clock)
        self._pauses = Pauses()

    def go(self) -> FixResult:
        """Everything, in order. An interruption ends it with what is known so far, and so does a real write."""
        try:
            self._baseline()
            self._improve()
            self._prune()
            self._prove()
            self._headline()
        except KeyboardInterrupt:
            self.found.stopped, self.found.interrupted = "interrupted", True
            self._let_go_of_the_unproven("interrupted before the proof")
        except RealWriteError as problem:
            self.found.stopped, self.found.written = "a trial has written to your files", problem.files
            self._let_go_of_the_unproven("ended before the proof")
        self.found.seconds = self._purse.spent_s
        self.found.noise = noise = self._speeds.noise
        if noise.repeats and noise.sd > UNSTEADY:
            self._remark(f"runs of the same plan vary by ±{noise.sd:.0%}: a gain below that may not have shown")
        return self.found

    # -- the baseline -----------------------------------------------------------------------------------------------

    def _baseline(self) -> None:
        steps = self._steps or FIRST_STEPS
        first = self._run("the command as it is", (), steps=steps, known_to=KNOWN_TO)
        if (
            first.speed is None
            or first.trace is None
            or first.hung
            or (first.code != 0 and first.case.breakdown.steps < steps)
        ):
            raise UsageError(first.why_no_baseline(steps))
        if first.code != 0:
            self._remark(f"the command does not end well by itself: {first.reason()}")
        self.found.before = self.found.after = first
        self._speeds.note((), first)
        speed, case = first.speed, first.case
        cold = case.storage_share >= COLD
        affordable = self._purse.left_s > 5 * first.seconds
        if self._steps is None and affordable and (speed.known_to > HARDLY_KNOWN_TO or cold):
            again = self._run("the command once more", ())
            if again.speed is not None and again.trace is not None and not again.hung:
                faster = again.speed.value / speed.value
                if cold and faster > 1 + DRIFT:
                    self._remark(
                        f"the first run read from a cold disk: the second was {faster:.2f}× as fast and counts"
                    )
                if cold:
                    self._speeds.forget()
                self._speeds.note((), again)
                self.found.before = self.found.after = again
        self._sight = self.before.trace
        found = diagnose(self.before.trace) if self.before.trace is not None else ()
        self._progress.say(f"{self._incumbent}: {found[0].title if found else 'nothing wrong was found'}")

    @property
    def before(self) -> Run:
        assert self.found.before is not None
        return self.found.before

    @property
    def _now(self) -> Run:
        """The run of what is kept so far."""
        assert self.found.after is not None
        return self.found.after

    # -- trials -----------------------------------------------------------------------------------------------------

    def _improve(self) -> None:
        while True:
            view = self._view()
            wanted, self.found.withheld = offers(view, self._wishes)
            wanted = [offer for offer in wanted if offer.promise >= MIN_GAIN]
            affordable = [offer for offer in map(self._with_time_to_prove, wanted) if self._has_time_for(offer)]
            if not affordable and self._may_look_at_an_epoch(view):
                self._look_at_an_epoch()
                continue
            if not affordable and self._undecided and self._purse.affords(self._undecided[0].changes):
                self._try(self._undecided.pop(0), again=True)
                continue
            if not wanted:
                at_ceiling = view.case.has_ceiling and view.case.headroom < AT_CEILING
                left = " of what --only and --skip leave" if self._wishes.only or self._wishes.skip else ""
                why = "at the ceiling of the step itself" if at_ceiling else f"nothing{left} promises more"
                unsure = ", ".join(offer.name for offer in self._undecided)
                self.found.stopped = f"too little time was left to look again at {unsure}" if unsure else why
                return
            if not affordable:
                self.found.untried = wanted
                self.found.stopped = self._too_short_for(wanted)
                return
            self._try(self._next_of(affordable))

    def _with_time_to_prove(self, offer: Offer) -> Offer:
        """It, or where there is no time for that, it without what takes the longest to prove: other rounding."""
        quick = tuple(change for change in offer.changes if change.safety != "equivalent")
        return replace(offer, changes=quick) if quick and offer.splits and not self._has_time_for(offer) else offer

    def _next_of(self, affordable: Sequence[Offer]) -> Offer:
        """The first of them; but where there is no time for both, what promises most."""
        first, best = affordable[0], max(affordable, key=lambda offer: offer.promise)
        both_s = 1.1 * (self._trying_s(first) + self._trying_s(best))
        reserve_s = self._purse.reserve_s((*first.changes, *best.changes), compare=best.promise < PROMISING)
        return best if best.promise > first.promise and self._purse.left_s - reserve_s < both_s else first

    def _has_time_for(self, offer: Offer) -> bool:
        reserve_s = self._purse.reserve_s(offer.changes, compare=offer.promise < PROMISING)
        return self._purse.left_s - reserve_s > self._trying_s(offer)

    def _trying_s(self, offer: Offer) -> float:
        """What a trial takes; one of pauses has a whole epoch, and needs another one to be compared with."""
        steps = self._epoch_steps() if offer.pauses else None
        if steps is None:
            return self._purse.trial_s(offer.changes)
        looked = self._long is not None or self._now.case.breakdown.steps >= steps
        return (1 if looked else 2) * self._purse.cost_s(self._now, steps)

    def _too_short_for(self, wanted: Sequence[Offer]) -> str:
        """What was not tried for want of time, and a budget that would do for the first of it."""
        enough = self._purse.enough_m(wanted[0].changes, self._trying_s(wanted[0]))
        names = ", ".join(offer.name for offer in wanted)
        return f"too little time was left to try and prove {names}: --budget {enough}m would do"

    def _view(self) -> View:
        run = self._long or self._now
        assert run.trace is not None
        assert self.before.trace is not None
        assert self._sight is not None
        attempts = [(a.change.name, a.gain) for a in self.found.attempts if a.change in self.found.kept]
        return View(
            trace=seen_like(run.trace, self._sight),
            first=self.before.trace,
            kept=self.found.kept,
            gained={name: gained.value for name, gained in attempts if gained is not None},
            tried=self.found.tried,
        )

    def _try(self, offer: Offer, *, again: bool = False) -> None:
        if offer.pauses and self._long is None:
            self._look_at_an_epoch()
        steps = self._epoch_steps() if offer.pauses else None
        plan = with_changes(self.found.kept, offer.changes)
        look_below_s = 0.0 if offer.computes_alike else self._now.step_s_at(self._incumbent, offer.changes)
        run = self._run(offer.name, plan, steps=steps, look_below_s=look_below_s)
        if offer.pauses and not self._failed(run) and not self._pauses.are_rarer(run, offer.changes):
            run = self._in_a_second_epoch(offer, run)
        if self._failed(run):
            if offer.splits:
                self._progress.say(f"{offer.name}: {run.reason()}. One by one")
                self._one_by_one(offer)
            else:
                self._decide(offer.changes, "unsafe", note=run.reason())
            return
        changes = self._effective(offer.changes, run)
        if not changes:
            return
        if offer.pauses and not self._pauses.are_rarer(run, changes):
            self._decide(changes, "undone", note="in a trial there are as many pauses as before")
            return
        self._speeds.note(with_changes(self.found.kept, changes), run, long=offer.pauses)
        gained, kept = self._judge(offer, changes, steady=self._taken_at_its_word(offer, run), patient=again)
        if kept:
            too_dear = self._too_dear(changes, run, gained)
            if too_dear is not None:
                self._decide(changes, "undone", gained, note=too_dear)
            else:
                self._keep(changes, run, gained, long=offer.pauses)
        elif gained.value > 1 and gained.high >= MIN_GAIN and not again:
            self._undecided.append(replace(offer, changes=changes))
            self._decide(changes, "undone", gained, note=self._not_shown(gained, changes))
        elif len(changes) > 1 and offer.worth_splitting and self._purse.affords(changes, runs=len(offer.parts)):
            self._progress.say(f"{offer.name}: {gained}. One by one")
            self._one_by_one(replace(offer, changes=changes))
        else:
            self._decide(changes, "undone", gained, note=self._not_shown(gained, changes))

    def _not_shown(self, gained: Gain, changes: tuple[Change, ...]) -> str:
        again = gained.value > MIN_GAIN and not self._purse.affords(changes)
        return _shortfall(gained) + (", and what time is left is for proof and comparison" if again else "")

    def _one_by_one(self, offer: Offer) -> None:
        for part in offer.parts:
            if self._purse.affords(part.changes):
                self._try(part)
            else:
                self._decide(part.changes, "undone", note="the budget was spent before it could be tried alone")

    def _failed(self, run: Run) -> bool:
        return run.hung or run.speed is None or (run.code != 0 and run.code != self.before.code)

    def _effective(self, changes: Sequence[Change], run: Run) -> tuple[Change, ...]:
        """Those that were really made; the others are told why not."""
        left = []
        for change in changes:
            refused = run.why_not_made(change) or scaled_twice(change, self.before.case, run.case)
            if refused:
                self._decide((change,), "not applicable", note=refused)
            else:
                left.append(change)
        return tuple(left)

    def _taken_at_its_word(self, offer: Offer, run: Run) -> bool:
        """Whether one run has to do: what else is to be tried leaves no time to come back to this offer, and where the
        card is the limit, with it and without, and nobody else is here, runs hardly differ."""
        view = self._view()
        limited = (c.on_gpu and c.has_ceiling and c.headroom < AT_CEILING for c in (view.case, run.case))
        if self._clear != CLEAR or not all(limited):
            return False
        others = [
            one for one in offers(view, self._wishes)[0] if one.promise >= MIN_GAIN and one.changes != offer.changes
        ]
        later = [one for one in others if self._has_time_for(one)]
        each_s = [self._trying_s(one) for one in (offer, *later)]
        later_s = sum(each_s[1:]) + 2 * max(each_s)  # and what is compiled once is compiled in every run after it
        every = (*offer.changes, *(change for one in later for change in one.changes))
        return self._purse.left_s - self._purse.reserve_s(every, compare=False) < later_s

    def _judge(self, offer: Offer, changes: tuple[Change, ...], *, steady: bool, patient: bool) -> tuple[Gain, bool]:
        """The gain of these changes, and whether they pay. Close calls are run again with patience, promising ones
        always: nothing else would show while training waits for what they mend."""
        old, new = self.found.kept, with_changes(self.found.kept, changes)
        repeats = 0
        while True:
            before, after = (self._speeds.of(plan, long=offer.pauses) for plan in (old, new))
            noise = self._speeds.noise_near(before, after, usual=STEADY_NOISE if steady else USUAL_RUN_NOISE)
            compared = gain_of_rarer_pauses if offer.pauses else gain
            gained = compared(before, after, noise)
            shown = gained.low > 1 and gained.value > MIN_GAIN
            # How long evaluation and checkpoints take was measured: that they are rarer is arithmetic.
            believed = shown and (steady or noise.repeats > 0 or offer.pauses or gained.value > self._clear)
            if gained.high < MIN_GAIN or repeats >= CLOSE_CALLS or not self._purse.affords(changes):
                return gained, shown
            if (believed and gained.low > MIN_GAIN) or (not patient and (believed or gained.value < PROMISING)):
                return gained, believed
            repeats += 1
            steps = self._epoch_steps() if offer.pauses else None
            fewer = len(after) < len(before)
            what, plan = (offer.name, new) if fewer else ("what is kept" if old else "the command as it was", old)
            again = self._run(f"{what}, again ({gained} is close)", plan, steps=steps, look_below_s=0.0)
            self._speeds.note(plan, again, long=offer.pauses)

    def _keep(self, changes: tuple[Change, ...], run: Run, gained: Gain, *, long: bool) -> None:
        earlier, self.found.kept = self.found.kept, with_changes(self.found.kept, changes)
        assert run.trace is not None
        assert self._sight is not None
        self._sight = seen_like(run.trace, self._sight)
        names = {change.name for change in changes}
        replaced = [change for change in earlier if change not in self.found.kept and change.name not in names]
        # A long run has other pauses in it; what it costs is judged by it alone.
        self._long = run if long else None
        if long:
            self._speeds.note(self.found.kept, run)
        else:
            self.found.after = run = run.seen_like(self._sight)
        if {change.safety for change in self.found.kept} <= {"identical", "reseeded"}:
            self._purse.unrounded = run
        if "loader" in names:
            self._undecided = [o for o in self._undecided if not {c.name for c in o.changes} <= LOADED_BY_HAND]
        for change in replaced:
            self._decide((change,), "undone", note=f"{all_in_words(changes)} takes its place")
        self._decide(changes, "kept", gained, run=run, before=self._speeds.figure_without(changes, self.found.kept))

    def _decide(
        self,
        changes: Sequence[Change],
        verdict: Verdict,
        gained: Gain | None = None,
        *,
        note: str = "",
        run: Run | None = None,
        before: Figure | None = None,
    ) -> None:
        """Write down what became of some changes, and tell it."""
        self.found.write_down(changes, verdict, gained, note=note, run=run, before=before)
        told = f": {note}" if note else f", {gained}" if gained else ""
        self._progress.say(f"{all_in_words(changes)}: {verdict}{told}")

    def _too_dear(self, changes: Sequence[Change], run: Run, gained: Gain) -> str | None:
        """Why compiling does not pay in the training as planned; None when it does, or when that is not known."""
        compiles = any(change.name == "compile" for change in changes)
        cost = compiling(run, self._now, gained.value) if compiles else None
        if cost is None or cost.pays is False:
            return cost.said if cost is not None else None
        self._remark(cost.said)
        return None

    # -- evaluation and checkpoints ---------------------------------------------------------------------------------

    def _may_look_at_an_epoch(self, view: View) -> bool:
        """Whether pauses could be had less often, a short trial did not see them, and a longer one is affordable."""
        if self._long is not None or not pause_knobs(view) or not may_be_changed(self._wishes):
            return False
        steps = self._epoch_steps()
        wanted = steps is not None and steps > self._steps_for(self._now)
        return wanted and self._purse.left_s - self._purse.reserve_s() > 2 * self._purse.cost_s(self._now, steps or 0)

    def _epoch_steps(self) -> int | None:
        """One epoch and a little more, at the batch size of what is kept; never less than a trial has."""
        steps = self._now.case.steps_an_epoch
        return max(math.ceil(1.1 * steps) + 5, self._steps_for(self._now)) if steps is not None else None

    def _look_at_an_epoch(self) -> None:
        steps, run = self._epoch_steps(), self._now
        if steps is None or run.case.breakdown.steps < steps:  # else it was long enough already
            what = "a whole epoch, for its pauses" if steps is not None else "what is kept, for its pauses"
            run = self._run(what, self.found.kept, steps=steps, look_below_s=0.0)
            if self._failed(run):
                self._remark(f"its pauses could not be looked at: {run.reason()}")
                run = self._now
        self._pauses.look_at(run, self.found.kept)
        self._speeds.note(self.found.kept, run, long=True)
        self._long = run

    def _in_a_second_epoch(self, offer: Offer, run: Run) -> Run:
        """After the first one a script may evaluate in any case."""
        steps = 2 * (self._epoch_steps() or 0)
        if not steps or self._purse.left_s - self._purse.reserve_s(offer.changes) < self._purse.cost_s(run, steps):
            return run
        return self._run(f"{offer.name}, two epochs", with_changes(self.found.kept, offer.changes), steps=steps)

    # -- what pays nothing in company -------------------------------------------------------------------------------

    def _prune(self) -> None:
        """Take out, one at a time, what was kept in a bundle and changes rounding: it has to pay for itself."""
        unknown = []
        for attempt in list(self.found.attempts):
            change = attempt.change
            if change not in self.found.kept or not attempt.together or change.safety != "equivalent":
                continue
            if not self._purse.affords((change,)):
                unknown.append(change)
                continue
            without = tuple(other for other in self.found.kept if other.name != change.name)
            run = self._run(f"without {in_words(change)}", without, look_below_s=0.0)
            if self._failed(run):
                continue
            self._speeds.note(without, run)
            pair = self._speeds.of(without), self._speeds.of(self.found.kept)
            alone = gain(*pair, self._speeds.noise_near(*pair))
            if alone.value >= MIN_GAIN:
                self.found.amend(attempt, gain=alone, together=())
                self._progress.say(f"{in_words(change)} by itself: {alone}")
            else:
                self.found.kept, self.found.after, self._long = without, run.seen_like(self._sight), None
                self._decide((change,), "undone", alone, note=f"{alone}: brings nothing beside the others")
        if unknown:
            self._remark(f"no time to see what each brings by itself: {', '.join(map(in_words, unknown))}")

    # -- proof: what `Proving` wants of us ----------------------------------------------------------------------------

    def _prove(self) -> None:
        reseeded, identical, rounded = map(self.found.kept_as, ("reseeded", "identical", "equivalent"))
        if not reseeded and not identical and not rounded:
            return
        if not self.has_time():
            self._let_go_of_the_unproven("the budget was spent before the proof")
            return
        Proving(self).prove(reseeded, identical, rounded)

    def has_time(self) -> bool:
        return self._purse.left_s > 0

    @property
    def room(self) -> int:
        return self._purse.room

    def prove_with(self, what: str, wanted: Sequence[ProofRun]) -> list[Run]:
        self._progress.run_begins(f"proof: {what}", self._purse.left_s)
        at_once, began_s = min(len(wanted), self.room), self._purse.spent_s
        runs = self._start.prove(wanted, timeout_s=self._purse.proof_timeout_s(wanted, at_once), at_once=at_once)
        took_s = self._purse.spent_s - began_s
        self.found.trials.append(RunRecord(what=f"proof: {what}", seconds=took_s, speed=None))
        return runs

    def said(self, line: str) -> None:
        self._progress.say(line)

    def proven(self, changes: Sequence[Change], proof: Proof) -> None:
        """Write the proof down; what has none is let go."""
        for change in changes:
            attempt = self.found.attempt_at(change)
            if proof.holds:
                self.found.amend(attempt, outcome=replace(attempt.outcome, proof=proof.text))
            else:
                self.found.let_go(change, f"{proof.standing}: {proof.text}")
        self._progress.say(f"proof, {all_in_words(changes)}: {proof.standing} ({proof.text})")

    def _let_go_of_the_unproven(self, why: str) -> None:
        """Rounding that was not looked at is not kept; the rest stays, and says so."""
        for change in self.found.kept:
            attempt = self.found.attempt_at(change)
            if attempt.outcome.proof or change.safety == "semantic":
                continue
            if change.safety == "equivalent":
                self.found.let_go(change, f"not proven: {why}")
            else:
                self.found.amend(attempt, outcome=replace(attempt.outcome, proof=f"not proven: {why}"))

    # -- before against after ---------------------------------------------------------------------------------------

    def _headline(self) -> None:
        """Both once more, side by side; the machine may have changed since the first run."""
        kept = self.found.kept
        if not kept:
            return
        paused = any(change.name in PAUSES for change in kept)
        steps = self._epoch_steps() if paused else None  # None, too, where an epoch has no length: a trial has to do
        in_time = paused and self._purse.comparing_s(steps) < self._purse.left_s
        long = in_time or (paused and all(self._speeds.of(plan, long=True) for plan in ((), kept)))
        if paused and not long:
            self._remark("the gain is that of the steps alone: there was no time for a whole epoch as it was")
            steps = None
        rarer = long and all(change.name in PAUSES for change in kept)  # steps take as long as before, but for luck
        first, fresh = self._speeds.of(())[0], None
        measured = bool(self._speeds.of(kept, long=long))
        if in_time if long else self._purse.left_s > (self._purse.comparing_s() if measured else 0.0):
            old = self._run("the command as it was, again", (), steps=steps, look_below_s=0.0)
            new = self._run("with all that was kept", kept, steps=steps, look_below_s=0.0)
            cut_off = new.hung and not self.has_time()
            if self._failed(new) and not cut_off:
                self._let_go_of_all(kept, f"failed: with all that was kept, {new.reason()}")
                return
            if not cut_off and not self._failed(old) and old.speed is not None and new.speed is not None:
                self.found.before, self.found.after = old.seen_like(self.before.trace), new.seen_like(self._sight)
                both = with_equal_steps([old.speed], [new.speed]) if rarer else ([old.speed], [new.speed])
                fresh = gain(_counting(long, both[0]), _counting(long, both[1]), ONE_RUN).value
                drift = old.speed.value / first.value
                if abs(math.log(drift)) > (DRIFT_OF_AN_EPOCH if long else DRIFT):
                    self._remark(f"the machine drifted: the command as it was ran at {drift:.2f}× its first speed")
                self._speeds.note((), old, long=long)
                self._speeds.note(kept, new, long=long)
        elif measured:
            self.found.after = self._long or self.found.after
            self._remark("no time was left to measure before and after once more: the gain is that of the trials")
        before, after = (self._speeds.of(plan, long=long) for plan in ((), kept))
        if not before or not after:  # interrupted in between, or a proof has taken something away
            self._remark("what was kept in the end was not measured as a whole")
            return
        for mind in (self._now.short_epoch, "" if long else slower_pauses(before[-1], after[-1])):
            if mind:
                self._remark(mind)
        before, after = with_equal_steps(before, after) if rarer else (before, after)
        # Both were measured early and late: a machine that drifts treats them alike.
        noise = self._speeds.noise_near(before, after)
        self.found.gain = gain(_counting(long, before), _counting(long, after), noise)
        self.found.speeds, self.found.paused = (pooled(before), pooled(after)), long
        self._progress.say(f"before → after: {self.found.gain}")
        # What was kept was picked for how fast it looked: the last runs have to say so too, or all of them be sure.
        unconfirmed = self.found.gain.low <= 1 if fresh is None else fresh < 1
        if self.found.gain.value < MIN_GAIN or unconfirmed:
            self._let_go_of_all(kept, f"not confirmed: {self.found.gain} in the end, with all that was kept")

    def _let_go_of_all(self, kept: Sequence[Change], why: str) -> None:
        for change in kept:
            self.found.let_go(change, why)
        self.found.gain = None
        self._remark("what had been kept was not confirmed by the last comparison, and was let go")

    # -- runs, time and noise ---------------------------------------------------------------------------------------

    def _run(
        self,
        what: str,
        changes: Sequence[Change],
        *,
        steps: int | None = None,
        known_to: float = math.inf,
        look_below_s: float | None = None,
    ) -> Run:
        self._progress.run_begins(what, self._purse.left_s)
        wanted = steps or self._steps_for(self._now if changes else self.before)
        run = self._start(
            changes,
            steps=wanted,
            timeout_s=self._purse.timeout_s(changes, wanted),
            at_least_s=MEASURE_S if self._ends_by_time else 0.0,
            known_to=known_to,
            look_below_s=look_below_s,
        )
        self.found.trials.append(RunRecord(what=what, seconds=run.seconds, speed=run.speed))
        if self._clear == CLEAR and run.in_company:
            self._clear = CLEAR_IN_COMPANY
            self._remark("others use this machine: a gain may not show, run it again when it is quiet")
        return self._pauses.as_planned(run, changes)

    @property
    def _incumbent(self) -> Speed:
        return self._speeds.of(self.found.kept)[-1]

    @property
    def _ends_by_time(self) -> bool:
        """Whether a trial goes on until it has trained for some seconds; several ranks would not agree on when."""
        alone = self.found.before is None or self.before.case.rank.info.world_size == 1
        return alone and self._steps is None

    def _steps_for(self, run: Run) -> int:
        """More than the batches that lie ready at the start; where steps alone say when it ends, for some seconds."""
        if self._steps is not None:
            return self._steps
        case = run.case
        step_s = max(1e-4, (case.breakdown.step_ms.mean or 0.0) / 1e3)
        enough = 0.0 if self._ends_by_time else MEASURE_S / step_s
        return int(min(MOST_STEPS, max(FIRST_STEPS, enough)))

    def _remark(self, text: str) -> None:
        self.found.remarks.append(text)
        self._progress.say(text)


def _shortfall(gained: Gain) -> str:
    """Why it does not count."""
    if gained.high < 1:
        return f"{gained}: slower"
    if gained.low > 1:
        return f"{gained}: too little to be believed of so few runs"
    return f"{gained}: no gain over 2% was shown"


def _counting(pauses: bool, runs: Sequence[Speed]) -> list[Speed]:
    """The runs with or without evaluation and checkpoints in their time."""
    return [run.counting_pauses for run in runs] if pauses else list(runs)
