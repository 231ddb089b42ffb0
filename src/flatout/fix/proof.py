"""Is training the same? Fingerprints of two runs → a Proof, in the words of the safety classes.

`same_batches` compares what reaches the model, `same_loss` the loss and the weights; docs/FIX.md has
what each class takes. Every five steps the one run goes on from the weights of the other: left on
their own, some trainings make a 30% other loss of any rounding, so what a change does could not be
told from that. Runs too short prove nothing, and say so.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Literal, NamedTuple

from flatout.fix.runs import ProofStep, Run, WeightMove
from flatout.model.stats import mean_of

FEWEST_BATCHES = 20
FEWEST_LOSSES = 200
COMPARED = 100
MARGIN, WIDEST_MARGIN, RESEEDED_MARGIN = 0.01, 0.03, 0.05  # of the loss
AS_FAR, RESEEDED_AS_FAR = 1.05, 2.0  # times the way that weights come, or one such part of it
SAME_WAY = 0.8  # a cosine; other random numbers in the model alone may make 0.9 of it
_MOST_DRIFT, _MOST_COHERENCE = 0.05, 1.4  # of a tensor's way; times what chance would make of it
_STANDS_STILL, _NEVER_MOVES = 0.5, 0.01  # of the leader's way
_USUAL_PACE = 0.2  # of the usual one; what nothing but rounding moves is often slower
_FEW_PASSES = 3  # in a step; more are parts of a batch
_RESAMPLES = 2_000
_REPEATS_APART = 3.0  # times what two runs of the same plan differ by, others may

Batches = list[tuple[Any, ...]]
Standing = Literal["identical", "reseeded", "equivalent", "failed", "not proven"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What two runs show about a change."""

    standing: Standing
    text: str

    @property
    def holds(self) -> bool:
        return self.standing not in ("failed", "not proven")


def same_batches(before: Run, after: Run, repeat: Run | None = None) -> Proof:
    """Whether the same bytes of the same samples reach the model in order. `repeat`: `before` once more."""
    if broken := cannot_compare(before, after):
        return broken
    unlike = _other_samples(before, after)
    shuffled = unlike is not None and all(map(_only_shuffled, before.proof, after.proof))
    if unlike is not None and not shuffled:
        return failed(unlike)
    batches, at_the_model, same_bytes, known = 0, 0, True, True
    for ours, theirs in zip(before.proof, after.proof, strict=True):
        indices, inputs = in_order("indices", ours, theirs), in_order("inputs", ours, theirs)
        known = known and all(indices)
        batches += min(map(len, indices)) or min(len(ours), len(theirs))
        at_the_model += min(map(len, inputs))
        same_bytes = same_bytes and all(inputs) and first_difference(*inputs) is None
    needed = FEWEST_BATCHES * len(before.proof)
    if batches < needed:
        return not_proven(f"only {batches} batches were seen, {FEWEST_BATCHES} are needed")
    if same_bytes and at_the_model < needed:
        return not_proven(f"only {at_the_model} batches were seen at the model, {FEWEST_BATCHES} are needed")
    if same_bytes:
        return _with_losses(before, after, repeat, "identical", f"{batches} batches: the same bytes reach the model")
    if not known:
        return failed("other bytes reach the model, and which samples they are is not known")
    order = "in the same order"
    if shuffled:
        order += " in the first epoch, and shuffled by other random numbers after it"
    text = f"{batches} batches: the same samples {order}, other random numbers in them"
    return _with_losses(before, after, repeat, "reseeded", text)


def same_loss(before: Run, after: Run, alone: Run | None = None) -> Proof:
    """Whether loss and weights go the same way. `alone`: `before` once more, following nobody.

    The loss of a step is the mean of its backward passes. Where it has a few, such as a critic's and a
    generator's, none of them may have failed either: errors that go opposite ways have no mean.
    """
    proof = _same_mean_loss(before, after, alone)
    runs = [run for run in (before, after, alone) if run is not None]
    counts = {len(step.losses) for run in runs for rank in run.proof for step in rank}
    several = min(counts, default=0) if len(counts) == 1 else 0
    if not proof.holds or not 1 < several <= _FEW_PASSES:
        return proof
    for place in range(several):
        one = _same_mean_loss(*(_of_pass(run, place) for run in runs))
        if one.standing == "failed":
            return failed(f"backward pass {place + 1} of each step: {one.text}")
    return proof


def failed(text: str) -> Proof:
    """The change does something else."""
    return Proof(standing="failed", text=text)


def not_proven(text: str) -> Proof:
    """The runs say nothing about the change."""
    return Proof(standing="not proven", text=text)


def cannot_compare(before: Run, after: Run) -> Proof | None:
    """Why two runs cannot be compared, or that one of them takes other steps than the other."""
    if before.hung or (before.code and not after.code):
        return not_proven(f"the run without it failed: {before.reason()}")
    if after.hung or after.code not in (0, before.code):
        return not_proven(f"its run failed: {after.reason()}")
    if len(before.proof) != len(after.proof) or not before.proof:
        return not_proven(f"fingerprints of {len(before.proof)} and {len(after.proof)} ranks")
    asked = min(before.asked, after.asked)
    for ours, theirs in zip(before.proof, after.proof, strict=True):
        steps, now = min(len(ours), asked), min(len(theirs), asked)
        if steps != now:
            return failed(f"training ends after {now} steps instead of {steps}")
    refused = [f"{name}: {why}" for name, why in after.refused.items() if name not in before.refused]
    if refused:
        return not_proven(f"it was not made in the proof's run ({'; '.join(refused)})")
    return None


# Samples and batches


def _other_samples(before: Run, after: Run) -> str | None:
    """Where the two runs part in their samples or the order of them, in words."""
    for rank, (ours, theirs) in enumerate(zip(before.proof, after.proof, strict=True)):
        batches = in_order("indices", ours, theirs)
        place = first_difference(*batches)
        if place is not None:
            where = f"rank {rank}, " if len(before.proof) > 1 else ""
            return f"{where}batch {place + 1}: {_how_unlike(batches[0][place], batches[1][place])}"
    return None


def _how_unlike(ours: Sequence[Any], theirs: Sequence[Any]) -> str:
    if sorted(map(str, ours)) == sorted(map(str, theirs)):
        return "the same samples in another order"
    return f"other samples: {_few(ours)} became {_few(theirs)}"


def _few(batch: Sequence[Any]) -> str:
    shown = [str(index) for index in batch[:4]]
    if len(batch) > 4:
        shown.append("…")
    return f"[{', '.join(shown)}]"


def _only_shuffled(ours: Sequence[ProofStep], theirs: Sequence[ProofStep]) -> bool:
    """Whether two runs part only in the shuffles of later passes.

    They do when samples that draw random numbers are no longer loaded in the training process, whose
    stream of random numbers seeds the shuffles.
    """
    places = [next(iter(in_order("begins", steps)[0]), None) for steps in (ours, theirs)]
    if places != ["here", "elsewhere"]:
        return False
    (first, *later), (their_first, *their_later) = _passes(ours), _passes(theirs)
    return first == their_first and _are_shuffles(later, first) and _are_shuffles(their_later, first)


def _are_shuffles(later: Sequence[Batches], first: Batches) -> bool:
    """Whether these passes go over the data as the first one does, in any order; the last may end early."""
    if not later:
        return True
    sizes = [len(batch) for batch in first]
    # A proof's run ends after so many steps, wherever the last pass is then.
    *whole, last = ([len(batch) for batch in batches] for batches in later)
    as_long = all(some == sizes for some in whole) and last == sizes[: len(last)]
    if not as_long or max(map(_most_frequent, later)) > _most_frequent(first):
        return False
    # Some may have been left over from the first pass: fewer than a batch.
    known = set(itertools.chain.from_iterable(first))
    strange = (len({*itertools.chain.from_iterable(batches)} - known) for batches in later)
    return _most_frequent(first) > 1 or max(strange) < max(sizes)


def _passes(steps: Sequence[ProofStep]) -> list[Batches]:
    """The batches of each pass over the data."""
    passes: list[Batches] = []
    for batch, begins in zip(*in_order("indices", steps), *in_order("begins", steps), strict=True):
        if begins or not passes:
            passes.append([])
        passes[-1].append(batch)
    return passes


def _most_frequent(batches: Batches) -> int:
    """How often the sample comes that comes most often."""
    return max(Counter(itertools.chain.from_iterable(batches)).values(), default=0)


def in_order(field: str, *ranks: Sequence[ProofStep]) -> list[list[Any]]:
    """Batch after batch, whichever step fetched it: a prefetcher is a step or two ahead."""
    return [list(itertools.chain.from_iterable(getattr(step, field) for step in steps)) for steps in ranks]


def first_difference(a: Sequence[Any], b: Sequence[Any]) -> int | None:
    """Where two sequences part, as far as both go."""
    return next((place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)


# Losses


class _Difference(NamedTuple):
    """How far losses are from others in the mean, as a share of the loss, with its 95% interval."""

    value: float
    low: float
    high: float


def _difference(a: Sequence[float], b: Sequence[float]) -> _Difference:
    scale = max(mean_of([abs(loss) for loss in a]), 1e-12)
    apart = [(y - x) / scale for x, y in zip(a, b, strict=True)]
    means = _resampled_means(apart)
    edge = len(means) // 40  # 2.5% on either side
    return _Difference(mean_of(apart), means[edge], means[-1 - edge])


def _resampled_means(values: Sequence[float]) -> list[float]:
    """A bootstrap: sorted means of resamples by short blocks of neighbours, which wrap round the end.

    Not the blocks of `model.stats`: a loss falls over these steps, and eight long blocks would take
    that for noise.
    """
    length = max(1, round(len(values) ** (1 / 3)))
    round_the_end = [*values, *values[: length - 1]]
    blocks = [mean_of(round_the_end[start : start + length]) for start in range(len(values))]
    draw, count = random.Random(0), math.ceil(len(values) / length)
    return sorted(mean_of(draw.choices(blocks, k=count)) for _ in range(_RESAMPLES))


def _losses(before: Run, after: Run) -> tuple[list[float], list[float]]:
    """The losses of the first rank, step by step, where both have one."""
    steps = zip(_of_first_rank(before), _of_first_rank(after), strict=False)
    pairs = [(x.loss, y.loss) for x, y in steps if x.loss is not None and y.loss is not None]
    return [x for x, _ in pairs], [y for _, y in pairs]


def _of_first_rank(run: Run) -> tuple[ProofStep, ...]:
    return next(iter(run.proof), ())


def _became_infinite(a: Sequence[float], b: Sequence[float]) -> bool:
    return any(math.isfinite(x) and not math.isfinite(y) for x, y in zip(a, b, strict=True))


def _equal_to_the_last_bit(a: Sequence[float], b: Sequence[float]) -> bool:
    return all(x == y or (math.isnan(x) and math.isnan(y)) for x, y in zip(a, b, strict=True))


def _with_losses(before: Run, after: Run, repeat: Run | None, standing: Standing, text: str) -> Proof:
    """The same batches may still teach otherwise: weights that went stale, say."""
    reseeded = standing == "reseeded"
    margin, as_far = MARGIN, AS_FAR
    if reseeded:
        margin, as_far = RESEEDED_MARGIN, RESEEDED_AS_FAR
    a, b = _losses(before, after)
    if _became_infinite(a, b):
        return failed(f"{text}, but the loss is not finite any more")
    astray = _astray(before, after, as_far)
    if astray is not None:
        return failed(f"{text}, but {astray}")
    if not a:
        return Proof(standing=standing, text=f"{text}; no loss was seen")
    if _equal_to_the_last_bit(a, b):
        return Proof(standing=standing, text=f"{text}; {len(a)} losses equal to the last bit")
    again = _losses_of_repeat(before, repeat, len(a))
    if not reseeded and _repeats_exactly(before, a, again):
        return failed(f"{text}, but the losses are not equal to the last bit")
    last = max(1, min(COMPARED, len(a) // 2))
    apart = _difference(a[-last:], b[-last:])
    if again:
        margin = max(margin, _REPEATS_APART * abs(_difference(a[-last:], again[-last:]).value))
    # With the same bytes, the loss itself has to lie within the margin; with other random numbers,
    # its interval may.
    within = abs(apart.value) <= margin
    if reseeded:
        within = apart.low <= margin and apart.high >= -margin
    if not within:
        return failed(f"{text}, but the loss is {apart.value:+.1%} ({last} steps, margin {margin:.0%})")
    text = f"{text}; loss {apart.value:+.2%} over the last {last} steps"
    if abs(apart.value) > margin:
        text += f", by chance as far as {last} steps can tell ({apart.low:+.0%} to {apart.high:+.0%})"
    return Proof(standing=standing, text=text)


def _losses_of_repeat(before: Run, repeat: Run | None, count: int) -> list[float]:
    """The first losses of the same plan once more; none where that run broke, which says nothing."""
    if repeat is None:
        return []
    again = _losses(before, repeat)[1][:count]
    return again if len(again) == count and all(map(math.isfinite, again)) else []


def _repeats_exactly(before: Run, first: Sequence[float], again: Sequence[float]) -> bool:
    """Whether the same plan gives the same losses to the last bit: as seen, or as a CPU is supposed to do."""
    if again:
        return _equal_to_the_last_bit(first, again)
    return before.trace is not None and not before.metrics.on_gpu


def _of_pass(run: Run, place: int) -> Run:
    """A run as if its steps had this backward pass alone."""
    ranks = (tuple(replace(step, loss=step.losses[place]) for step in rank) for rank in run.proof)
    return replace(run, proof=tuple(ranks))


def _same_mean_loss(before: Run, after: Run, alone: Run | None = None) -> Proof:
    if broken := cannot_compare(before, after):
        return broken
    if unlike := _other_samples(before, after):
        return failed(unlike)
    a, b = _losses(before, after)
    if len(a) < FEWEST_LOSSES:
        return not_proven(f"{len(a)} steps with a loss, {FEWEST_LOSSES} are needed")
    if _became_infinite(a, b):
        return failed("the loss is not finite any more")
    apart, moved = _difference(a[-COMPARED:], b[-COMPARED:]), _typical_move(before, after)
    margin, margin_in_words = _margin(before, alone)
    text = f"loss {apart.value:+.2%} ({apart.low:+.2%} to {apart.high:+.2%}) over the last {COMPARED} steps"
    text += f", margin {margin_in_words}"
    if moved is not None:
        text += f"; {_in_words(moved)}"
    astray = _astray(before, after, AS_FAR)
    if astray is not None and astray not in text:
        text += f"; {astray}"
    if astray is not None or apart.low > margin or apart.high < -margin:
        return failed(text)
    same_way = moved is None or moved.direction >= SAME_WAY
    if same_way and -margin < apart.low and apart.high < margin:
        return Proof(standing="equivalent", text=text)
    return not_proven(text)


def _margin(before: Run, alone: Run | None) -> tuple[float, str]:
    """What the loss may differ by, as a share of it, and in words."""
    usual = MARGIN, f"{MARGIN:.0%}"
    if alone is None:
        return usual
    first, again = _losses(before, alone)
    if len(again) >= FEWEST_LOSSES and all(map(math.isfinite, again)):
        apart = _difference(first[-COMPARED:], again[-COMPARED:])
        noise = max(abs(apart.low), abs(apart.high))
        margin = min(noise, WIDEST_MARGIN)
        if margin > MARGIN:
            return margin, f"{margin:.1%}: left to itself, the same plan makes {noise:.1%}"
    return usual


# Weights


def _moves(before: Run, after: Run) -> list[WeightMove]:
    """How the weights of all ranks moved beside those they followed, in the steps that both runs have."""
    pairs = zip(before.proof, after.proof, strict=False)
    steps = (theirs for ours, rank in pairs for _, theirs in zip(ours, rank, strict=False))
    return [step.moved for step in steps if step.moved is not None]


def _typical_move(before: Run, after: Run) -> WeightMove | None:
    """How they moved typically; None where they followed nobody."""
    moves = _moves(before, after)
    if not moves:
        return None
    length = median(move.length for move in moves)
    return WeightMove(length=length, direction=median(move.direction for move in moves))


def _astray(before: Run, after: Run, within: float) -> str | None:
    """What weights do that those they follow do not, in words.

    Other random numbers lead each tensor elsewhere: then only all of them together are asked, for a
    factor of two.
    """
    moved = _typical_move(before, after)
    if moved is None:
        return None
    if not moved.as_far(within):
        return _in_words(moved)
    if within > AS_FAR:
        return None
    moves = _moves(before, after)
    # The typical step hides weights that stop learning late in the run.
    still = sum(move.length < _STANDS_STILL for move in moves)
    if still > 1 and still > len(moves) / 10:
        return f"weights stand still {still} times of {len(moves)}"
    # All tensors together hide one that no longer learns. A small one is further off by chance than a
    # large one.
    for drift in after.drifts:
        by_chance = _MOST_COHERENCE * (1 + 2 / math.sqrt(drift.size))
        if drift.drift > _MOST_DRIFT and drift.coherence > by_chance:
            return f"{drift.name} goes elsewhere, by {drift.drift:.0%} of its way"
        never = drift.length < _NEVER_MOVES and drift.pace > _USUAL_PACE
        # A bias may have no gradient but rounding.
        if never or (drift.dims > 1 and drift.length < _STANDS_STILL):
            return f"{drift.name} moves {drift.length:.2f} as far"
    return None


def _in_words(moved: WeightMove) -> str:
    return f"weights move {moved.length:.2f} as far, {moved.direction:.2f} in the same direction"
