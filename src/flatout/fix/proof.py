"""Is training the same? Fingerprints of two runs → a Proof, in the words of the safety classes.

identical    what reaches the model is the same, byte for byte, and so are the samples and their order; the loss
             stays within the margin too
reseeded     the same samples in the same order; the bytes differ by the random numbers of augmentation. Where those
             were drawn in the training process, they went into the shuffle of the next pass too: then the first pass
             has the same order, and the later ones are shuffles of the same
equivalent   paired runs, same seed and data: the mean difference of the loss over the last 100 of at least 200 steps
             lies within a margin, and a bootstrap over blocks is sure of that; and the weights come as far, in the
             same direction. The margin is 1% of the loss, or what two runs of the same plan differ by where that is
             more. A loss that is lower by more is no proof either: the same mathematics does not learn better.

Every five steps the one run goes on from the weights of the other. Left to themselves, some trainings make a 30% other
loss of any rounding, and of the order in which a card adds; so what a change does could not be told from that.
Runs that are too short prove nothing, and say so.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from flatout.fix.runs import ProofStep, Run, WeightMove

FEWEST_BATCHES = 20
FEWEST_LOSSES = 200
COMPARED = 100
MARGIN, WIDEST_MARGIN, RESEEDED_MARGIN = 0.01, 0.03, 0.05  # of the loss
AS_FAR, RESEEDED_AS_FAR = 1.05, 2.0  # times the way that weights come, or one such part of it
SAME_WAY = 0.8  # a cosine; other random numbers in the model alone may make 0.9 of it
_DRIFT, _COHERENCE = 0.05, 1.4  # of a tensor's way; times what chance would make of it, and more for a small one
_STANDS_STILL, _NEVER_MOVES = 0.5, 0.01  # of the leader's way
_USUAL_PACE = 0.2  # of what is usual; what nothing but rounding moves is often slower
_FEW_PASSES = 3  # in a step; more are parts of a batch
_RESAMPLES = 2_000
_REPEATS_APART = 3.0  # times what two runs of the same plan differ by, others may

Floats = npt.NDArray[np.float64]
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
    """Whether the model gets the same samples, in the same order, the same bytes; `repeat` is `before` once more."""
    broken = _not_whole(before, after)
    if broken is not None:
        return broken
    unlike = _other_samples(before, after)
    shuffled = unlike is not None and all(map(_only_shuffled, before.proof, after.proof))
    if unlike is not None and not shuffled:
        return Proof(standing="failed", text=unlike)
    batches, looked_into, same_bytes, known = 0, 0, True, True
    for ours, theirs in zip(before.proof, after.proof, strict=True):
        indices, inputs = _in_order("indices", ours, theirs), _in_order("inputs", ours, theirs)
        known = known and bool(indices[0] and indices[1])
        batches += min(map(len, indices)) or min(len(ours), len(theirs))
        looked_into += min(map(len, inputs))
        same_bytes = same_bytes and bool(inputs[0] and inputs[1]) and _first_difference(*inputs) is None
    if batches < FEWEST_BATCHES * len(before.proof):
        return _unproven(f"only {batches} batches were seen, {FEWEST_BATCHES} are needed")
    if same_bytes and looked_into < FEWEST_BATCHES * len(before.proof):
        return _unproven(f"only {looked_into} batches were seen at the model, {FEWEST_BATCHES} are needed")
    if same_bytes:
        return _with_losses(before, after, repeat, "identical", f"{batches} batches: the same bytes reach the model")
    if not known:
        return Proof(standing="failed", text="other bytes reach the model, and which samples they are is not known")
    order = "in the same order"
    if shuffled:
        order += " in the first epoch, and shuffled by other random numbers after it"
    said = f"{batches} batches: the same samples {order}, other random numbers in them"
    return _with_losses(before, after, repeat, "reseeded", said)


def _not_whole(before: Run, after: Run) -> Proof | None:
    """Why two runs cannot be compared, or that one of them takes other steps than the other."""
    if before.hung or (before.code and not after.code):
        return _unproven(f"the run without it failed: {before.reason()}")
    if after.hung or after.code not in (0, before.code):
        return _unproven(f"its run failed: {after.reason()}")
    if len(before.proof) != len(after.proof) or not before.proof:
        return _unproven(f"fingerprints of {len(before.proof)} and {len(after.proof)} ranks")
    asked = min(before.asked, after.asked)
    for ours, theirs in zip(before.proof, after.proof, strict=True):
        steps, now = min(len(ours), asked), min(len(theirs), asked)
        if steps != now:
            return Proof(standing="failed", text=f"training ends after {now} steps instead of {steps}")
    unmade = {name: why for name, why in after.refused.items() if name not in before.refused}
    if unmade:
        said = "; ".join(f"{name}: {why}" for name, why in unmade.items())
        return _unproven(f"it was not made in the proof's run ({said})")
    return None


def _other_samples(before: Run, after: Run) -> str | None:
    """Where the two runs part in their samples or the order of them, in words."""
    for rank, (ours, theirs) in enumerate(zip(before.proof, after.proof, strict=True)):
        indices = _in_order("indices", ours, theirs)
        differs = _first_difference(*indices)
        if differs is not None:
            where = f"rank {rank}, " if len(before.proof) > 1 else ""
            return f"{where}batch {differs + 1}: {_unlike(indices, differs)}"
    return None


def _only_shuffled(ours: Sequence[ProofStep], theirs: Sequence[ProofStep]) -> bool:
    """Whether two runs part only in the shuffles of later passes, as they do when samples that draw random numbers are
    no longer loaded in the training process: its stream, from which shuffles are seeded, then goes another way."""
    if [next(iter(_in_order("begins", steps)[0]), None) for steps in (ours, theirs)] != ["here", "elsewhere"]:
        return False
    (first, *later), (their_first, *their_later) = _passes(ours), _passes(theirs)
    return first == their_first and _are_shuffles(later, first) and _are_shuffles(their_later, first)


def _are_shuffles(later: Sequence[Batches], first: Batches) -> bool:
    """Whether these passes go over the data as the first one does, in any order; the last may end early."""
    if not later:
        return True
    sizes = [len(batch) for batch in first]
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
    for batch, begins in zip(*_in_order("indices", steps), *_in_order("begins", steps), strict=True):
        if begins or not passes:
            passes.append([])
        passes[-1].append(batch)
    return passes


def _most_frequent(batches: Batches) -> int:
    """How often the sample comes that comes most often."""
    return max(Counter(itertools.chain.from_iterable(batches)).values(), default=0)


def _in_order(field: str, *ranks: Sequence[ProofStep]) -> list[list[Any]]:
    """Batch after batch, whichever step fetched it: a prefetcher is a step or two ahead."""
    return [list(itertools.chain.from_iterable(getattr(step, field) for step in steps)) for steps in ranks]


def _with_losses(before: Run, after: Run, repeat: Run | None, standing: Standing, said: str) -> Proof:
    """The same batches may still teach otherwise: weights that went stale, say."""
    a, b = _losses(before, after)
    astray = _astray(before, after, RESEEDED_AS_FAR if standing == "reseeded" else AS_FAR)
    if not np.isfinite(b[np.isfinite(a)]).all():
        return Proof(standing="failed", text=f"{said}, but the loss is not finite any more")
    if astray is not None:
        return Proof(standing="failed", text=f"{said}, but {astray}")
    if not len(a):
        return Proof(standing=standing, text=f"{said}; no loss was seen")
    if np.array_equal(a, b, equal_nan=True):
        return Proof(standing=standing, text=f"{said}; {len(a)} losses equal to the last bit")
    again = _losses(before, repeat)[1][: len(a)] if repeat is not None else a[:0]
    again = again if len(again) == len(a) and np.isfinite(again).all() else a[:0]  # one that broke says nothing
    if standing == "identical" and _repeats_exactly(before, a, again):
        return Proof(standing="failed", text=f"{said}, but the losses are not equal to the last bit")
    last = max(1, min(COMPARED, len(a) // 2))
    low, high, scale = _interval(a[-last:], b[-last:])
    alone = _REPEATS_APART * abs(float((again - a)[-last:].mean())) if len(again) else 0.0
    margin = max(alone, (RESEEDED_MARGIN if standing == "reseeded" else MARGIN) * scale)
    apart = float((b - a)[-last:].mean())
    # Of the same bytes the loss itself has to lie within the margin; with other random numbers, its interval may.
    within = abs(apart) <= margin if standing == "identical" else low <= margin and high >= -margin
    if not within:
        off_by = f"the loss is {apart / scale:+.1%} ({last} steps, margin {margin / scale:.0%})"
        return Proof(standing="failed", text=f"{said}, but {off_by}")
    chance = ""
    if abs(apart) > margin:
        chance = f", by chance as far as {last} steps can tell ({low / scale:+.0%} to {high / scale:+.0%})"
    return Proof(standing=standing, text=f"{said}; loss {apart / scale:+.2%} over the last {last} steps{chance}")


def _repeats_exactly(before: Run, first: Floats, again: Floats) -> bool:
    """Whether the same plan gives the same losses to the last bit: as seen, or as a CPU is supposed to do."""
    if not len(again):
        return before.trace is not None and not before.case.on_gpu
    return np.array_equal(first, again, equal_nan=True)


def same_loss(before: Run, after: Run, alone: Run | None = None) -> Proof:
    """Whether the loss goes the same way, and the weights with it. `alone` is `before` once more, left to itself.

    The loss of a step is the mean of its backward passes. Where it has a few, such as a critic's and a generator's,
    none of them may have failed either: errors that go opposite ways have no mean.
    """
    proof = _same_loss(before, after, alone)
    runs = [run for run in (before, after, alone) if run is not None]
    counts = {len(step.losses) for run in runs for rank in run.proof for step in rank}
    several = min(counts, default=0) if len(counts) == 1 else 0
    if not proof.holds or not 1 < several <= _FEW_PASSES:
        return proof
    for place in range(several):
        one = _same_loss(*(_of_pass(run, place) for run in runs))
        if one.standing == "failed":
            return Proof(standing="failed", text=f"backward pass {place + 1} of each step: {one.text}")
    return proof


def _of_pass(run: Run, place: int) -> Run:
    """A run as if its steps had this backward pass alone."""
    ranks = (tuple(replace(step, loss=step.losses[place]) for step in rank) for rank in run.proof)
    return replace(run, proof=tuple(ranks))


def _same_loss(before: Run, after: Run, alone: Run | None = None) -> Proof:
    broken = _not_whole(before, after)
    if broken is not None:
        return broken
    a, b = _losses(before, after)
    unlike = _other_samples(before, after)
    if unlike is not None:
        return Proof(standing="failed", text=unlike)
    if len(a) < FEWEST_LOSSES:
        return _unproven(f"{len(a)} steps with a loss, {FEWEST_LOSSES} are needed")
    if not np.isfinite(b[np.isfinite(a)]).all():
        return Proof(standing="failed", text="the loss is not finite any more")
    low, high, scale = _interval(a[-COMPARED:], b[-COMPARED:])
    apart, moved = float((b - a)[-COMPARED:].mean()), _moved(before, after)
    margin, whose = _margin(before, alone, scale)
    said = f"loss {apart / scale:+.2%} ({low / scale:+.2%} to {high / scale:+.2%}) over the last {COMPARED} steps"
    said += f", margin {whose}" + (f"; {_in_words(moved)}" if moved is not None else "")
    astray = _astray(before, after, AS_FAR)
    if low > margin or high < -margin or astray is not None:
        return Proof(standing="failed", text=said if astray is None or astray in said else f"{said}; {astray}")
    within = -margin < low and high < margin and (moved is None or moved.direction >= SAME_WAY)
    return Proof(standing="equivalent", text=said) if within else _unproven(said)


def _margin(before: Run, alone: Run | None, scale: float) -> tuple[float, str]:
    """What the loss may differ by, and in words."""
    first, again = _losses(before, alone) if alone is not None else (np.empty(0), np.empty(0))
    if len(again) >= FEWEST_LOSSES and np.isfinite(again).all():
        noise = max(map(abs, _interval(first[-COMPARED:], again[-COMPARED:])[:2])) / scale
        margin = min(noise, WIDEST_MARGIN)
        if margin > MARGIN:
            return margin * scale, f"{margin:.1%}: left to itself, the same plan makes {noise:.1%}"
    return MARGIN * scale, f"{MARGIN:.0%}"


def _moves(before: Run, after: Run) -> list[WeightMove]:
    """How the weights of all ranks went beside those they followed, in the steps that both runs have."""
    pairs = zip(before.proof, after.proof, strict=False)
    steps = (there for ours, theirs in pairs for _, there in zip(ours, theirs, strict=False))
    return [step.moved for step in steps if step.moved is not None]


def _moved(before: Run, after: Run) -> WeightMove | None:
    """How they went typically; None where they followed nobody."""
    moves = _moves(before, after)
    if not moves:
        return None
    length, direction = np.median(np.asarray(moves), axis=0)
    return WeightMove(length=float(length), direction=float(direction))


def _astray(before: Run, after: Run, within: float) -> str | None:
    """What weights do that those they follow do not, in words. Other random numbers lead each tensor elsewhere: then it
    is asked of all of them together, and not more than within a factor of two."""
    moved = _moved(before, after)
    if moved is None:
        return None
    if not moved.as_far(within):
        return _in_words(moved)
    if within > AS_FAR:
        return None
    still = sum(move.length < _STANDS_STILL for move in _moves(before, after))
    if still > 1 and still > len(_moves(before, after)) / 10:
        return f"weights stand still {still} times of {len(_moves(before, after))}"
    for drift in after.drifts:
        if drift.drift > _DRIFT and drift.coherence > _COHERENCE * (1 + 2 / math.sqrt(drift.size)):
            return f"{drift.name} goes elsewhere, by {drift.drift:.0%} of its way"
        never = drift.length < _NEVER_MOVES and drift.pace > _USUAL_PACE
        if never or (drift.dims > 1 and drift.length < _STANDS_STILL):  # a bias may have no gradient but rounding
            return f"{drift.name} moves {drift.length:.2f} as far"
    return None


def _in_words(moved: WeightMove) -> str:
    return f"weights move {moved.length:.2f} as far, {moved.direction:.2f} in the same direction"


def _unproven(text: str) -> Proof:
    return Proof(standing="not proven", text=text)


def _losses(a: Run, b: Run) -> tuple[Floats, Floats]:
    """The losses of the first rank, step by step, where both have one."""
    pairs = [(x.loss, y.loss) for x, y in _steps(a, b) if x.loss is not None and y.loss is not None]
    both = np.asarray(pairs, dtype=np.float64).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def _steps(a: Run, b: Run) -> Iterator[tuple[ProofStep, ProofStep]]:
    return zip(a.proof[0], b.proof[0], strict=False) if a.proof and b.proof else iter(())


def _interval(a: Floats, b: Floats) -> tuple[float, float, float]:
    """Of the mean difference, and the size of the loss it is measured against."""
    low, high = np.percentile(_resampled_means(b - a), (2.5, 97.5))
    return float(low), float(high), max(float(np.abs(a).mean()), 1e-12)


def _resampled_means(values: Floats) -> Floats:
    """A bootstrap: means of resamples by blocks of neighbours, which are alike; blocks wrap round the end."""
    draw, length = np.random.default_rng(0), max(1, round(len(values) ** (1 / 3)))
    starts = draw.integers(len(values), size=(_RESAMPLES, -(-len(values) // length), 1))
    places = (starts + np.arange(length)) % len(values)
    means: Floats = values[places.reshape(_RESAMPLES, -1)].mean(axis=1)
    return means


def _first_difference(a: Sequence[Any], b: Sequence[Any]) -> int | None:
    """Where two sequences part, as far as both go."""
    return next((place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)


def _unlike(batches: Sequence[Sequence[tuple[Any, ...]]], place: int) -> str:
    """What happened to the samples, in a word."""
    a, b = (Counter(itertools.chain.from_iterable(some)) for some in batches)
    here, there = batches[0][place], batches[1][place]
    if sorted(map(str, here)) == sorted(map(str, there)):
        return "the same samples in another order"
    shown = f"{_few(here)} became {_few(there)}"
    if max(b.values(), default=0) > max(a.values(), default=0):
        return f"samples come more than once: {shown}"
    if len(here) > len(there):
        return f"samples are missing: {shown}"
    return f"other samples: {shown}"


def _few(batch: Sequence[Any]) -> str:
    return "[" + ", ".join(str(index) for index in batch[:4]) + (", …]" if len(batch) > 4 else "]")
