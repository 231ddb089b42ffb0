"""Is a training with a person's edit the same? Fingerprints of runs → a Proof, stricter than that of flatout's changes.

Nothing is known of an edit, so nothing but rounding is forgiven: the same samples in the same order,
in training and in evaluation; at the model the same bytes, or numbers equal within rounding; the same
settings of the optimizers; and, every few steps from the same weights on, the same loss and the same
update of each tensor. `again` is the command as it was once more: of what the machine alone makes
differ, three times as much is allowed.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any, NamedTuple

from flatout.fix.proof import FEWEST_BATCHES, Proof, cannot_compare, failed, first_difference, in_order, not_proven
from flatout.fix.runs import Content, LearnedGroup, ProofStep, Run

# What rounding may make of a tensor, as a share of its length; of whole numbers nothing.
_ROUNDING = {"float64": 1e-12, "float32": 8e-6, "complex64": 8e-6, "bfloat16": 4e-3, "float16": 5e-4}
_WORST, _LATER = 50, 10  # times as far as typical: in the worst step, and in steps that begin with weights of their own


class _Rounding(NamedTuple):
    """What it may make of the loss, in the typical step, and of a tensor's way in a few steps; as shares."""

    loss: float
    update: float


# By the fewest bits that the command as it is computes with: float32, TF32, or 16.
_FINE, _TF32, _HALF = _Rounding(2e-6, 2e-3), _Rounding(3e-5, 5e-3), _Rounding(2e-4, 0.02)
_NOISE = 3.0  # times what the same command makes when it is run again
_BY_CHANCE = 1.4  # times as far as chance alone leads: more adds up
_SAME_SETTING = 1e-6
_WHOLE = re.compile(r"^(?:u?int\d+|bool)")

Steps = Sequence[ProofStep]
Check = Callable[[Run, Run], str | None]


def same_training(before: Run, after: Run, again: Run | None = None) -> Proof:
    """Whether `after`, which followed `before`, is the same training, as far as both were watched."""
    # Nothing was asked of its run: what a flatout.apply of its own need not or cannot do shows in
    # what is compared.
    after = replace(after, refused={})
    if broken := cannot_compare(before, after):
        return broken
    if _sees_data(before) and not _sees_data(after):
        return not_proven(
            "what reaches the model cannot be seen with it (is a function that calls the model compiled?)"
        )
    data: tuple[Check, ...] = (_other_samples, _other_training_data, _other_evaluation, _other_settings)
    for check in data:
        if difference := check(before, after):
            own = check(before, again) if again is not None else None
            if own:
                return not_proven(f"what it is compared with differs from itself, run again: {own}")
            return failed(difference)
    # A loss that is another one in other steps than those from the same weights on only follows from
    # other updates.
    difference = _other_losses(before, after, again, fresh=True) or _other_weights(before, after, again)
    if difference := difference or _other_losses(before, after, again):
        return failed(difference)
    return _nothing_differs(before, after)


def _sees_data(run: Run) -> bool:
    """Whether anything was seen to reach a model, in training or evaluation."""
    steps = [step for rank in run.proof for step in rank]
    return any(step.inputs or (step.evaluation is not None and step.evaluation.inputs) for step in steps)


def _by_rank(before: Run, after: Run, check: Callable[[Steps, Steps], str | None]) -> str | None:
    for rank, (ours, theirs) in enumerate(zip(before.proof, after.proof, strict=False)):
        if difference := check(ours, theirs):
            return f"rank {rank}: {difference}" if len(before.proof) > 1 else difference
    return None


# Samples


def _other_samples(before: Run, after: Run) -> str | None:
    return _by_rank(before, after, _other_order)


def _other_order(ours: Steps, theirs: Steps) -> str | None:
    """Where two runs part in their samples, in the order of them, or in where a pass over the data begins."""
    batches, begins = in_order("indices", ours, theirs), in_order("begins", ours, theirs)
    place = first_difference(*batches)
    start = first_difference(*([bool(one) for one in some] for some in begins))
    if start is not None and (place is None or start <= place):
        now = "ends before" if begins[1][start] else "goes on with"
        return f"a pass over the data {now} batch {start + 1}, which it did not do"
    if place is None:
        return None
    return f"batch {place + 1}: {_how_unlike(batches[0][place], batches[1][place])}"


def _how_unlike(ours: Sequence[Any], theirs: Sequence[Any]) -> str:
    """Which samples are missing and which are new; else that the order is another."""
    had, has = (Counter(map(str, batch)) for batch in (ours, theirs))
    words = [(had - has, "missing"), (has - had, "more than before")]
    told = [f"{_named(list(samples))} {what}" for samples, what in words if samples]
    return ", ".join(told) or "the same samples in another order"


def _named(samples: Sequence[str]) -> str:
    shown = ", ".join(samples[:3]) + ", …" * (len(samples) > 3)
    return f"sample{'s' * (len(samples) > 1)} {shown}"


# What reaches the model


def _other_training_data(before: Run, after: Run) -> str | None:
    return _by_rank(before, after, lambda ours, theirs: _other_contents(ours, theirs, "training"))


def _other_evaluation(before: Run, after: Run) -> str | None:
    def check(ours: Steps, theirs: Steps) -> str | None:
        was, now = ([step.evaluation or ProofStep() for step in steps] for steps in (ours, theirs))
        return _other_evaluated(was, now) or _other_contents(was, now, "evaluation")

    return _by_rank(before, after, check)


def _other_evaluated(ours: Steps, theirs: Steps) -> str | None:
    for number, (our, their) in enumerate(zip(ours, theirs, strict=False), 1):
        if len(our.indices) != len(their.indices):
            return f"the evaluation before step {number} has {len(their.indices)} batches, not {len(our.indices)}"
        place = first_difference(our.indices, their.indices)
        if place is not None:
            unlike = _how_unlike(our.indices[place], their.indices[place])
            return f"batch {place + 1} of the evaluation before step {number}: {unlike}"
    return None


def _other_contents(ours: Steps, theirs: Steps, where: str) -> str | None:
    """The first step in which something else reaches the model, beyond rounding."""
    for number, (our, their) in enumerate(zip(ours, theirs, strict=False), 1):
        if len(our.inputs) != len(their.inputs):
            given = f"{len(their.inputs)} tensors in {where}, not {len(our.inputs)}"
            fewer = where == "training" and len(their.inputs) < len(our.inputs)
            hint = " (is it in evaluation mode?)" * fewer
            return f"step {number}: the model is given {given}{hint}"
        for was, now in _unequal(our, their):
            if unlike := _unlike(was, now):
                return f"step {number}: in {where} {unlike}"
    return None


def _unequal(our: ProofStep, their: ProofStep) -> Iterator[tuple[Content, Content]]:
    """The contents of tensors whose checksums differ."""
    for place, (mine, other) in enumerate(zip(our.inputs, their.inputs, strict=True)):
        if mine != other:
            yield our.contents[place], their.contents[place]


def _unlike(was: Content, now: Content) -> str:
    """How the contents of two tensors differ beyond rounding; empty where they do not."""
    if _WHOLE.sub("int", was.kind) != _WHOLE.sub("int", now.kind):
        return f"the model is given {now.kind} instead of {was.kind}"
    far, rounding = apart(was, now), _ROUNDING.get(was.kind.partition("[")[0], 0.0)
    if far <= rounding:
        return ""
    return f"other numbers reach the model: {now.kind}, {far:.2g} of their length apart (rounding: {rounding:.0e})"


def apart(was: Content, now: Content) -> float:
    """How far two tensors are apart, as a share of the length of the first."""
    if not was.numbers or len(was.numbers) != len(now.numbers):
        return math.inf
    far = [abs(a - b) / (was.numbers[0] or 1.0) for a, b in zip(was.numbers, now.numbers, strict=True)]
    return max(far) if all(map(math.isfinite, far)) else math.inf


# Optimizers, losses, weights


def _other_settings(before: Run, after: Run) -> str | None:
    return _by_rank(before, after, _other_steps)


def _other_steps(ours: Steps, theirs: Steps) -> str | None:
    """The first step in which something else is trained, or an optimizer has other settings."""
    was: tuple[LearnedGroup, ...] = ()
    now: tuple[LearnedGroup, ...] = ()
    for number, (our, their) in enumerate(zip(ours, theirs, strict=False), 1):
        was, now = our.learned or was, their.learned or now
        if len(was) != len(now):
            return f"step {number}: the optimizers have {len(now) - 1} groups of weights instead of {len(was) - 1}"
        for old, new in zip(was, now, strict=True):
            if difference := _other_group(old, new):
                return f"{difference} from step {number} on"
    return None


def _other_group(old: LearnedGroup, new: LearnedGroup) -> str:
    if old.kind != new.kind:
        return f"the optimizer is {new.kind} instead of {old.kind}"
    if lost := Counter(old.shapes) - Counter(new.shapes):
        return f"{'buffer' if old.kind == 'buffers' else 'a trained weight of shape'} {next(iter(lost))} is missing"
    if old.kind != "buffers" and old.shapes != new.shapes:  # further buffers only remember something
        return "other weights are trained, or in another order,"
    for name in sorted(old.settings.keys() & new.settings.keys()):
        if not _same_number(old.settings[name], new.settings[name]):
            return f"the optimizer's {name} is {new.settings[name]} instead of {old.settings[name]}"
    return ""


def _same_number(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same_number, one, other))
    if isinstance(one, int | float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=_SAME_SETTING)
    return bool(one == other)


def _rounding_in(run: Run) -> _Rounding:
    """By what the command as it was computes with."""
    if run.trace is None:
        return _FINE
    facts = run.metrics.facts
    if any(dtype != "None" for dtype in facts.autocast) or {"bfloat16", "float16"} & {*facts.parameter_dtypes}:
        return _HALF
    return _TF32 if facts.on_gpu and (facts.tf32_matmul or facts.tf32_convolutions) else _FINE


def _other_losses(before: Run, after: Run, again: Run | None, *, fresh: bool = False) -> str | None:
    """The first step with another loss; `fresh`: of those that begin with the weights of the run that
    is followed."""
    allowed = _rounding_in(before).loss * (1 if fresh else _LATER)
    noise = _far(before.proof[0], again.proof[0]) if again is not None else []
    typical = max(allowed, _NOISE * median(noise or [0.0]))
    worst = max(_WORST * allowed, _NOISE * max(noise, default=0.0))

    def check(ours: Steps, theirs: Steps) -> str | None:
        for number, (our, their) in enumerate(zip(ours, theirs, strict=False), 1):
            if len(our.losses) != len(their.losses):
                return f"step {number} has {len(their.losses)} backward passes, not {len(our.losses)}"
        every, far = _far(ours, theirs), dict[int, float]()
        for number, one in enumerate(every, 1):
            if not fresh or number == 1 or theirs[number - 2].moved is not None:
                far[number] = one
        limit = worst
        if far and median(far.values()) > typical:
            limit = typical
        place = next((number for number, one in far.items() if one > limit), None)
        if place is None:
            return None
        changed = _changed(ours[place - 1], theirs[place - 1], typical)
        return f"step {place}: the loss is another one{', though from the same weights' * fresh}: {changed}"

    return _by_rank(before, after, check)


def loss_apart(before: Run, after: Run) -> float:
    """How far the losses of the first rank are apart, in the typical step, as a share of the usual loss."""
    return median(_far(before.proof[0], after.proof[0]) or [0.0]) if before.proof and after.proof else math.inf


def _far(ours: Steps, theirs: Steps) -> list[float]:
    """How far each step's losses are apart, as a share of the usual loss."""
    known = [abs(loss) for step in ours for loss in step.losses if math.isfinite(loss)]
    scale = (fmean(known) if known else 0.0) or 1.0
    return [
        max((_distance(x, y) for x, y in zip(our.losses, their.losses, strict=False)), default=0.0) / scale
        for our, their in zip(ours, theirs, strict=False)
    ]


def _distance(x: float, y: float) -> float:
    if x == y or (math.isnan(x) and math.isnan(y)):
        return 0.0
    return abs(x - y) if math.isfinite(x - y) else math.inf


def _changed(our: ProofStep, their: ProofStep, typical: float) -> str:
    was, now = (math.fsum(step.losses) for step in (our, their))
    share = f"{(now - was) / abs(was):+.2%}" if was else "from nothing"
    return f"{was:.7g} became {now:.7g} ({share}; rounding makes {typical:.0e} of it)"


def _other_weights(before: Run, after: Run, again: Run | None) -> str | None:
    """The tensor whose update is another one, beyond rounding: the one that is furthest off."""
    noise = {drift.name: drift.apart for drift in again.drifts} if again is not None else {}
    allowed = _rounding_in(before).update
    for drift in sorted(after.drifts, key=lambda drift: -drift.apart):
        # A vector that nothing but rounding moves (a bias before a batch norm) goes anywhere, and back again.
        chance = _BY_CHANCE * (1 + 2 / math.sqrt(drift.size))
        aimless = drift.coherence < chance and 0.5 < drift.length < 2
        by_chance = drift.learned and drift.dims < 2 and aimless
        if not by_chance and drift.apart > max(allowed, _NOISE * noise.get(drift.name, 0.0)):
            if math.isinf(drift.apart):
                return f"{drift.name} moves, which it did not do"
            return f"from the same weights, {drift.name} is {drift.apart:.1%} of its way off after a few steps"
    return None


# Nothing differs: was enough seen to say so?


def _nothing_differs(before: Run, after: Run) -> Proof:
    steps = min(map(len, after.proof))
    inputs = [step.inputs for rank in after.proof for step in rank]
    moved = any(step.moved is not None for rank in after.proof for step in rank)
    if steps < FEWEST_BATCHES:
        return not_proven(f"only {steps} steps were compared, {FEWEST_BATCHES} are needed")
    if not any(step.losses for step in after.proof[0]) or not (moved or any(inputs)):
        return not_proven("neither losses and data at the model nor losses and weights could be seen")
    same_bytes = inputs == [step.inputs for rank in before.proof for step in rank][: len(inputs)]
    far = max(_far(before.proof[0], after.proof[0]))
    words = ["the same bytes at the model" if same_bytes else "the same numbers at the model but for rounding"]
    words.append("losses equal to the last bit" if not far else f"losses within {far:.1g} of theirs")
    evaluated = sum(len(step.evaluation.indices) for step in after.proof[0] if step.evaluation is not None)
    if evaluated:
        words.append(f"{evaluated} batches of evaluation")
    if not moved:
        words.append("weights could not be compared")
    furthest = max((drift.apart for drift in after.drifts if drift.dims > 1), default=0.0)
    standing: Any = "equivalent"
    if same_bytes and not far and not furthest:
        standing = "identical"
    return Proof(standing=standing, text=f"{steps} steps: {', '.join(words)}")
