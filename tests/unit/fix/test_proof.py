"""Each wrong change is caught, a right one passes; and how often, of many."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flatout.fix.proof import same_batches, same_loss
from flatout.fix.runs import Drift, ProofStep, Run, WeightMove

BATCH = 4


def proof_run(losses: Sequence[float | None], *, inputs: str = "", indices: Sequence[tuple[int, ...]] = ()) -> Run:
    steps = tuple(
        ProofStep(
            inputs=(f"{inputs}{n}",),
            indices=(indices[n] if indices else tuple(range(BATCH * n, BATCH * (n + 1))),),
            loss=loss,
        )
        for n, loss in enumerate(losses)
    )
    return Run(changes=(), code=0, seconds=1.0, proof=(steps,))


def learning(steps: int, seed: int = 0, noise: float = 0.1) -> np.ndarray:
    """A loss that falls, with the noise of batches: the same in runs of the same data."""
    rng = np.random.default_rng(seed)
    return 0.5 + 1.5 * np.exp(-np.arange(steps) / 80) + noise * rng.normal(size=steps)


def test_the_same_bytes_are_identical_and_the_losses_say_so() -> None:
    proof = same_batches(proof_run(learning(60)), proof_run(learning(60)))
    assert (proof.standing, proof.text) == (
        "identical",
        "60 batches: the same bytes reach the model; 60 losses equal to the last bit",
    )


def test_other_random_numbers_in_the_same_samples_are_reseeded() -> None:
    proof = same_batches(proof_run(learning(60)), proof_run(learning(60, seed=1), inputs="other"))
    assert proof.standing == "reseeded"


def test_a_loss_that_differs_by_chance_gets_a_note() -> None:
    """GIVEN losses so noisy that thirty of them say little."""
    noisy = learning(60, seed=3, noise=1.0)
    proofs = [same_batches(proof_run(learning(60, seed=n, noise=1.0)), proof_run(noisy, inputs="o")) for n in range(9)]
    said = [proof.text for proof in proofs if "by chance" in proof.text]
    assert said
    assert all(proof.standing == "reseeded" for proof in proofs if "by chance" in proof.text)
    assert " over the last 30 steps, by chance as far as 30 steps can tell (-" in said[0]


def test_a_prefetcher_that_fetches_ahead_is_no_difference() -> None:
    """Its batches belong to later steps, but come in the same order; and it has asked for two more."""
    plain = proof_run(learning(60))
    (steps,) = plain.proof
    ahead = [replace(step, indices=()) for step in steps]
    ahead[0] = replace(steps[0], indices=tuple(step.indices[0] for step in steps[:3]))
    ahead[1:-2] = [replace(step, indices=later.indices) for step, later in zip(steps[1:-2], steps[3:], strict=True)]
    assert same_batches(plain, replace(plain, proof=(tuple(ahead),))).standing == "identical"


def passes_run(passes: Sequence[Sequence[tuple[int, ...]]], loaded: str, inputs: str = "") -> Run:
    """A run over the data several times."""
    batches = [(batch, loaded if n == 0 else None) for some in passes for n, batch in enumerate(some)]
    steps = (
        ProofStep(inputs=(f"{inputs}{n}",), indices=(batch,), begins=(begins,), loss=float(loss))
        for n, ((batch, begins), loss) in enumerate(zip(batches, learning(len(batches)), strict=True))
    )
    return Run(changes=(), code=0, seconds=1.0, proof=(tuple(steps),))


def shuffled(seed: int) -> list[tuple[int, ...]]:
    order = np.random.default_rng(seed).permutation(80).tolist()
    return [tuple(order[BATCH * n : BATCH * (n + 1)]) for n in range(20)]


def test_samples_that_no_longer_draw_in_the_training_process_reshuffle_later_epochs() -> None:
    """GIVEN epochs of 20 batches, THEN the first has to be the same, and the others shuffles of it."""
    before = passes_run([shuffled(0), shuffled(1), shuffled(2)[:10]], "here")
    proof = same_batches(before, passes_run([shuffled(0), shuffled(3), shuffled(4)[:10]], "elsewhere", "other"))
    assert proof.standing == "reseeded"
    assert "in the same order in the first epoch, and shuffled by other random numbers after it" in proof.text


@pytest.mark.parametrize(
    ("passes", "loaded"),
    [
        ([shuffled(3), shuffled(1), shuffled(2)], "elsewhere"),  # the first epoch is another
        ([shuffled(0), shuffled(3)[:-1], shuffled(2)], "elsewhere"),  # a batch is left out
        ([shuffled(0), [*shuffled(3)[:-1], shuffled(3)[0]], shuffled(2)], "elsewhere"),  # one comes twice
        ([shuffled(0), [shuffled(3)[0][:-1], *shuffled(3)[1:]], shuffled(2)], "elsewhere"),  # a sample is missing
        ([shuffled(0), [tuple(n + 80 for n in b) for b in shuffled(3)], shuffled(2)], "elsewhere"),  # of other data
        ([shuffled(0), shuffled(3), shuffled(2)], "here"),  # nothing there explains another order
    ],
)
def test_epochs_that_are_no_shuffles_fail(passes: Sequence[Sequence[tuple[int, ...]]], loaded: str) -> None:
    before = passes_run([shuffled(0), shuffled(1), shuffled(2)], "here")
    assert same_batches(before, passes_run(passes, loaded, "other")).standing == "failed"


def drop(batches: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return [*batches[:30], batches[30][:-1], *batches[31:]]


def leave_out(batches: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return [*batches[:30], *batches[31:], batches[30]]


def reorder(batches: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return [*batches[:30], batches[30][::-1], *batches[31:]]


def repeat(batches: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return [*batches[:30], batches[29], *batches[31:]]


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (drop, "batch 31: other samples"),
        (leave_out, "batch 31: other samples"),
        (reorder, "batch 31: the same samples in another order"),
        (repeat, "batch 31: other samples"),
    ],
)
def test_harm_done_to_the_samples_is_named(
    harm: Callable[[list[tuple[int, ...]]], list[tuple[int, ...]]], words: str
) -> None:
    batches = [tuple(range(BATCH * n, BATCH * (n + 1))) for n in range(60)]
    proof = same_batches(proof_run(learning(60)), proof_run(learning(60), indices=harm(batches)))
    assert proof.standing == "failed"
    assert proof.text.startswith(words)


def test_the_same_batches_that_teach_nothing_fail() -> None:
    """Weights that went stale: what goes in is right, the loss stays where it was."""
    stale = np.full(60, learning(60)[0])
    proof = same_batches(proof_run(learning(60)), proof_run(stale))
    assert proof.standing == "failed"
    assert "but the loss is" in proof.text


def test_other_random_numbers_may_change_the_loss_a_little_and_the_same_bytes_may_not() -> None:
    losses = learning(60)
    higher = [loss * 1.03 for loss in losses]
    assert same_batches(proof_run(losses), proof_run(higher, inputs="other")).standing == "reseeded"
    assert same_batches(proof_run(losses), proof_run(higher)).standing == "failed"
    assert same_batches(proof_run(losses), proof_run([1.1 * x for x in losses], inputs="other")).standing == "failed"
    plain, again = proof_run(losses), proof_run([loss * 1.015 for loss in losses])  # the machine itself is not so sure
    assert same_batches(plain, proof_run(higher), again).standing == "identical"


def test_bytes_that_were_seen_in_a_few_steps_alone_prove_nothing() -> None:
    before, after = proof_run(learning(60)), proof_run(learning(60))
    seldom = tuple(
        replace(step, inputs=step.inputs if number < 10 else ()) for number, step in enumerate(after.proof[0])
    )
    proof = same_batches(before, replace(after, proof=(seldom,)))
    assert proof.standing == "not proven"
    assert "at the model" in proof.text


def test_few_batches_and_few_losses_prove_nothing() -> None:
    assert same_batches(proof_run(learning(10)), proof_run(learning(10))).standing == "not proven"
    short = same_loss(proof_run(learning(150)), proof_run(learning(150)))
    assert (short.standing, short.text) == ("not proven", "150 steps with a loss, 200 are needed")


def test_fingerprints_of_ranks_that_are_missing_prove_nothing() -> None:
    one = proof_run(learning(60))
    two = replace(one, proof=one.proof * 2)
    assert same_batches(one, two).standing == "not proven"
    assert same_batches(replace(one, proof=()), replace(one, proof=())).standing == "not proven"


def test_a_loss_that_is_no_number_fails() -> None:
    broken = learning(220)
    broken[150:] = np.nan
    assert same_loss(proof_run(learning(220)), proof_run(broken)).standing == "failed"


def rounding(losses: np.ndarray, seed: int) -> np.ndarray:
    """bf16: an error of a few ten-thousandths in each loss, and a path that strays slowly."""
    rng = np.random.default_rng(1000 + seed)
    return losses * (1 + 3e-4 * rng.normal(size=len(losses)) + 1e-4 * np.cumsum(rng.normal(size=len(losses))) / 5)


def test_other_rounding_passes() -> None:
    losses = learning(220)
    proof = same_loss(proof_run(losses), proof_run(rounding(losses, 0)))
    assert proof.standing == "equivalent", proof.text


WRONG: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "2% higher": lambda losses, seed: 1.02 * rounding(losses, seed),
    "2% lower": lambda losses, seed: 0.98 * rounding(losses, seed),
    "stale weights": lambda losses, seed: np.full(len(losses), losses[:5].mean()),
    "half the speed of learning": lambda losses, seed: np.interp(
        np.arange(len(losses)) / 2, np.arange(len(losses)), losses
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_power_wrong_changes_are_never_called_equivalent(name: str) -> None:
    """Of 200 trainings with noise of 10% in the batches, none that teaches otherwise gets through."""
    through = 0
    for seed in range(200):
        losses = learning(220, seed)
        through += same_loss(proof_run(losses), proof_run(WRONG[name](losses, seed))).holds
    assert through == 0, f"{through} of 200 got through"


def test_power_right_changes_are_hardly_ever_refused() -> None:
    passed = 0
    for seed in range(200):
        losses = learning(220, seed)
        passed += same_loss(proof_run(losses), proof_run(rounding(losses, seed))).holds
    assert passed >= 196, f"{passed} of 200 passed"


def test_where_the_machine_itself_differs_from_run_to_run_its_noise_is_the_margin() -> None:
    """Two runs of the same plan, left to themselves, differ by 2%, and so may a change."""
    losses = learning(220)
    rng = np.random.default_rng(5)
    by_how_much = (0.02, 0.2, 0.012, 0.05)
    again, chaos, changed, wrong = (proof_run(losses * (1 + by + 0.01 * rng.normal(size=220))) for by in by_how_much)
    assert not same_loss(proof_run(losses), changed).holds
    with_repeat = same_loss(proof_run(losses), changed, again)
    assert with_repeat.standing == "equivalent"
    assert "margin 2.4%: left to itself, the same plan makes 2.4%" in with_repeat.text
    assert same_loss(proof_run(losses), wrong, again).standing == "failed"
    assert same_loss(proof_run(losses), wrong, chaos).standing == "failed", "beside the same weights 3% are enough"
    for broken in (learning(40), np.full(220, np.nan)):
        assert not same_loss(proof_run(losses), changed, proof_run(broken)).holds


def moving(run: Run, *moved: tuple[float, float]) -> Run:
    """A run that has followed another, and how its weights went, every few steps."""
    (steps,) = run.proof
    told = {11 + 10 * n: WeightMove(*move) for n, move in enumerate(moved)}
    return replace(run, proof=(tuple(replace(step, moved=told.get(n)) for n, step in enumerate(steps)),))


@pytest.mark.parametrize(
    ("moved", "standing"),
    [
        ((1.0, 0.99), "equivalent"),
        ((1.12, 0.89), "equivalent"),  # rounding alone moves some, across the way of the others
        ((1.0, 0.9), "equivalent"),  # other random numbers in the model
        ((1.0, 0.5), "not proven"),
        ((0.93, 1.0), "failed"),
        ((1.1, 1.0), "failed"),
        ((0.0, 0.0), "failed"),
    ],
)
def test_weights_have_to_come_as_far_in_the_same_direction(moved: tuple[float, float], standing: str) -> None:
    losses = learning(220)
    proof = same_loss(proof_run(losses), moving(proof_run(rounding(losses, 0)), *[moved] * 21))
    assert proof.standing == standing
    assert proof.text.endswith(f"weights move {moved[0]:.2f} as far, {moved[1]:.2f} in the same direction")


def test_a_few_of_those_steps_may_be_odd() -> None:
    losses = learning(220)
    odd = moving(proof_run(losses), (0.2, 0.1), *[(1.0, 1.0)] * 19, (3.0, 0.5))
    assert same_loss(proof_run(losses), odd).standing == "equivalent"
    stops = moving(proof_run(losses), *[(1.0, 1.0)] * 17, *[(0.0, 0.0)] * 4)
    proof = same_loss(proof_run(losses), stops)
    assert proof.standing == "failed"
    assert proof.text.endswith("; weights stand still 4 times of 21")


@pytest.mark.parametrize(
    ("drift", "words"),
    [
        ({"drift": 0.4, "coherence": 1.1}, ""),  # by chance: rounding of what has hardly a gradient
        ({"drift": 0.02, "coherence": 4.0}, ""),  # always the same way, and next to nothing
        ({"drift": 0.1, "coherence": 2.5}, "head.weight goes elsewhere, by 10% of its way"),
        ({"drift": 1.0, "coherence": 1.2, "length": 0.0}, "head.weight moves 0.00 as far"),
        ({"drift": 1.0, "coherence": 1.2, "length": 0.0, "dims": 1}, "head.weight moves 0.00 as far"),
        ({"drift": 1.0, "coherence": 1.2, "length": 0.0, "dims": 1, "pace": 0.06}, ""),  # a bias before a norm
        ({"drift": 1.0, "coherence": 1.2, "length": 0.2, "dims": 1}, ""),  # and one that rounding moves less
        ({"drift": 0.5, "coherence": 2.5, "size": 4}, ""),  # of four numbers chance makes as much
    ],
)
def test_no_tensor_goes_its_own_way(drift: dict[str, Any], words: str) -> None:
    losses, usual = learning(220), {"name": "head.weight", "size": 512, "dims": 2, "length": 1.0, "pace": 1.0}
    after = moving(proof_run(rounding(losses, 0)), *[(1.0, 1.0)] * 21)
    proof = same_loss(proof_run(losses), replace(after, drifts=(Drift(**usual | drift),)))
    assert proof.standing == ("failed" if words else "equivalent")
    assert proof.text.endswith(words)
    same = same_batches(proof_run(losses), replace(after, drifts=(Drift(**usual | drift),)))
    assert same.standing == ("failed" if words else "identical")


def test_the_same_batches_have_to_move_the_weights_as_far() -> None:
    before = proof_run(learning(60))
    assert same_batches(before, moving(before, *[(1.0, 1.0)] * 5)).standing == "identical"
    stale = same_batches(before, moving(before, *[(0.0, 0.0)] * 5))
    assert (stale.standing, stale.text) == (
        "failed",
        "60 batches: the same bytes reach the model, but weights move 0.00 as far, 0.00 in the same direction",
    )
    other = proof_run(learning(60, seed=1), inputs="other")
    assert same_batches(before, moving(other, *[(0.8, 0.3)] * 5)).standing == "reseeded"
    assert same_batches(before, moving(other, *[(0.1, 0.3)] * 5)).standing == "failed"


def asked(run: Run, steps: int, **other: Any) -> Run:
    return replace(run, asked=steps, **other)


@pytest.mark.parametrize("compare", [same_batches, same_loss])
def test_runs_that_broke_off_prove_nothing(compare: Callable[[Run, Run], Any]) -> None:
    whole, cut = asked(proof_run(learning(220)), 220), asked(proof_run(learning(220)[:210]), 220)
    assert compare(whole, asked(whole, 220)).holds
    crashed = compare(whole, replace(cut, code=1, output="RuntimeError: of the change"))
    assert (crashed.standing, crashed.text) == (
        "not proven",
        "its run failed: exit code 1: RuntimeError: of the change",
    )
    lost = compare(whole, cut)
    assert (lost.standing, lost.text) == ("failed", "training ends after 210 steps instead of 220")
    assert compare(replace(cut, code=1), whole).standing == "not proven"
    assert compare(replace(whole, code=3), replace(whole, code=3)).holds, "that is how the command ends by itself"
    refused = compare(whole, replace(whole, refused={"compile": "no compiler"}))
    assert (refused.standing, refused.text) == (
        "not proven",
        "it was not made in the proof's run (compile: no compiler)",
    )


@pytest.mark.parametrize("broken", [[], [1.0] * 30, [1.0] * 50 + [math.nan] * 10])
def test_repeats_that_broke_say_nothing_of_the_machine(broken: list[float]) -> None:
    losses = learning(60)
    plain, repeat = proof_run(losses), proof_run(np.asarray(broken))
    for inputs, times in (("", 1.5), ("other", 2.0)):
        wrong = proof_run(losses * times, inputs=inputs)
        assert same_batches(plain, wrong, repeat).standing == "failed"


def test_the_same_bytes_have_to_give_the_losses_that_the_same_plan_gives_again() -> None:
    losses = learning(60)
    plain, near = proof_run(losses), proof_run(losses * 1.005)
    assert same_batches(plain, near).standing == "identical", "a GPU adds in another order"
    assert same_batches(plain, near, plain).standing == "failed", "this one does not"
    noisy = losses * np.tile([0.75, 1.36], 30)
    assert same_batches(plain, proof_run(noisy)).standing == "failed", "5% in the mean, and no telling"


def test_a_stream_has_no_samples_to_compare() -> None:
    def stream(inputs: str) -> Run:
        run = proof_run(learning(60), inputs=inputs)
        return replace(run, proof=(tuple(replace(step, indices=()) for step in run.proof[0]),))

    assert same_batches(stream(""), stream("")).standing == "identical"
    other = same_batches(stream(""), stream("other"))
    assert other.text == "other bytes reach the model, and which samples they are is not known"


@pytest.mark.parametrize(("critic", "generator", "standing"), [(1, 1, "equivalent"), (0.8, 1.4, "failed")])
def test_errors_of_two_losses_do_not_make_up_for_each_other(critic: float, generator: float, standing: str) -> None:
    def trained(*times: float) -> Run:
        both = [learning(220, seed) * part for seed, part in enumerate((2 * times[0], times[1]))]
        (steps,) = proof_run(np.mean(both, axis=0)).proof
        apart = (replace(step, losses=tuple(pair)) for step, pair in zip(steps, zip(*both, strict=True), strict=True))
        return Run(changes=(), code=0, seconds=1.0, proof=(tuple(apart),))

    def mean_alone(run: Run) -> Run:
        return replace(run, proof=(tuple(replace(step, losses=()) for step in run.proof[0]),))

    assert same_loss(*map(mean_alone, (trained(1, 1), trained(critic, generator)))).standing == "equivalent"
    proof = same_loss(trained(1, 1), trained(critic, generator))
    assert proof.standing == standing
    assert standing != "failed" or proof.text.startswith("backward pass 1 of each step: loss -20.00%")


def test_unpaired_data_is_no_proof_of_rounding() -> None:
    other = [tuple(range(1000 + n, 1004 + n)) for n in range(220)]
    proof = same_loss(proof_run(learning(220)), proof_run(learning(220), indices=other))
    assert proof.standing == "failed"
