"""What an edit of the person's own may make differ, and what it may not: on hand-built runs of a proof."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from flatout.fix.edit_proof import same_training
from flatout.fix.proof import Proof
from flatout.fix.runs import Content, Drift, LearnedGroup, ProofStep, Run, WeightMove

STEPS = 40
EVERY = 5
ADAM = LearnedGroup("AdamW", {"lr": 1e-3, "weight_decay": 0.1}, ("[8, 3]", "[8]"))
BUFFERS = LearnedGroup("buffers", {}, ("0.norm.running_mean [8]",))
Change = Callable[[int, ProofStep], ProofStep]


def step(number: int) -> ProofStep:
    """One that trains on eight samples; after every tenth, four are evaluated."""
    batch = tuple(range(8 * number, 8 * number + 8))
    evaluation = None
    if number % 10 == 9:
        evaluation = ProofStep(
            inputs=("e1",), indices=((0, 1, 2, 3),), contents=(Content("float32[4, 3]", (5.0, 1.0, -1.0)),)
        )
    return ProofStep(
        inputs=(f"x{number}", f"y{number}"),
        contents=(Content("float32[8, 3]", (10.0, 3.0, -2.0)), Content("int64[8]", (20.0, 7.0, 1.0))),
        indices=(batch,),
        begins=("here" if number == 0 else None,),
        loss=2.0,
        losses=(2.0 - number / 100,),
        moved=WeightMove(length=1.0, direction=1.0) if number % EVERY == 4 and number > 5 else None,
        learned=(ADAM, BUFFERS) if number == 0 else (),
        evaluation=evaluation,
    )


def run(change: Change = lambda number, step: step, **more: Any) -> Run:
    steps = tuple(change(number, step(number)) for number in range(STEPS))
    return Run(changes=(), code=0, seconds=10.0, asked=STEPS, proof=(steps,), drifts=(drift(),), **more)


def drift(**more: Any) -> Drift:
    known: dict[str, Any] = {
        "name": "conv.weight",
        "size": 24,
        "dims": 2,
        "drift": 0.0,
        "coherence": 0.0,
        "length": 1.0,
    }
    return Drift(**known | {"pace": 1.0} | more)


def verdict(change: Change = lambda number, step: step, **more: Any) -> Proof:
    return same_training(run(), run(change, **more))


def test_nothing_differs() -> None:
    proof = verdict()
    assert proof.standing == "identical"
    assert proof.text == (
        "40 steps: the same bytes at the model, losses equal to the last bit, 4 batches of evaluation"
    )


def from_step(place: int, **changes: Any) -> Change:
    """A change of the fields of every step from this one on."""
    return lambda number, step: replace(step, **changes) if number >= place else step


def with_content(place: int, content: Content) -> Change:
    """Another tensor reaches the model in the place of the first."""

    def change(number: int, step: ProofStep) -> ProofStep:
        if number < place:
            return step
        return replace(step, inputs=("other", step.inputs[1]), contents=(content, step.contents[1]))

    return change


@pytest.mark.parametrize(
    ("number", "standing"), [(3.0 + 5e-5, "equivalent"), (3.0 + 1e-3, "failed"), (math.nan, "failed")]
)
def test_data_may_be_another_by_rounding_alone(number: float, standing: str) -> None:
    proof = verdict(with_content(7, Content("float32[8, 3]", (10.0, number, -2.0))))
    assert proof.standing == standing
    if standing == "failed":
        assert proof.text.startswith("step 8: in training other numbers reach the model: float32[8, 3]")
    else:
        assert "the same numbers at the model but for rounding" in proof.text


def test_whole_numbers_may_have_another_type_and_nothing_else() -> None:
    def labels(content: Content) -> Change:
        return lambda number, step: replace(step, inputs=(step.inputs[0], "z"), contents=(step.contents[0], content))

    assert verdict(labels(Content("int32[8]", (20.0, 7.0, 1.0)))).standing == "equivalent"
    assert verdict(labels(Content("int64[8]", (20.0, 7.0001, 1.0)))).standing == "failed"


def test_smaller_pictures() -> None:
    proof = verdict(with_content(0, Content("float32[8, 2]", (10.0, 3.0, -2.0))))
    assert proof.text == "step 1: in training the model is given float32[8, 2] instead of float32[8, 3]"


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (range(16, 23), "batch 3: sample 23 missing"),
        ((16, 16, *range(17, 23)), "batch 3: sample 23 missing, sample 16 more than before"),
        (range(23, 15, -1), "batch 3: the same samples in another order"),
    ],
)
def test_other_samples(batch: Any, words: str) -> None:
    proof = verdict(lambda number, step: replace(step, indices=(tuple(batch),)) if number == 2 else step)
    assert (proof.standing, proof.text) == ("failed", words)


def test_a_shorter_pass_over_the_data() -> None:
    proof = verdict(lambda number, step: replace(step, begins=("here",)) if number == 20 else step)
    assert proof.text == "a pass over the data ends before batch 21, which it did not do"


def test_a_loader_that_is_no_longer_asked_says_nothing_of_its_samples() -> None:
    assert verdict(from_step(0, indices=(), begins=())).standing == "identical"


def test_evaluation_on_other_data() -> None:
    def evaluated(**changes: Any) -> Change:
        return lambda _, step: replace(step, evaluation=step.evaluation and replace(step.evaluation, **changes))

    fewer = verdict(evaluated(indices=(), inputs=(), contents=()))
    assert fewer.text == "the evaluation before step 10 has 0 batches, not 1"
    other = verdict(evaluated(inputs=("e2",), contents=(Content("float32[4, 3]", (5.0, 2.0, -1.0)),)))
    assert other.text.startswith("step 10: in evaluation other numbers reach the model")


@pytest.mark.parametrize(
    ("group", "words"),
    [
        (
            ADAM._replace(settings={"lr": 1e-3, "weight_decay": 0.0}),
            "the optimizer's weight_decay is 0.0 instead of 0.1",
        ),
        (ADAM._replace(kind="Adam"), "the optimizer is Adam instead of AdamW"),
        (ADAM._replace(shapes=("[8, 3]",)), "a trained weight of shape [8] is missing"),
    ],
)
def test_something_else_is_trained(group: LearnedGroup, words: str) -> None:
    proof = verdict(lambda number, step: replace(step, learned=(group, BUFFERS)) if number == 0 else step)
    assert (proof.standing, proof.text) == ("failed", f"{words} from step 1 on")


def test_a_schedule_that_is_lost() -> None:
    slower = ADAM._replace(settings={"lr": 9e-4, "weight_decay": 0.1})
    before = run(lambda number, step: replace(step, learned=(slower, BUFFERS)) if number == 20 else step)
    assert same_training(before, run()).text == "the optimizer's lr is 0.001 instead of 0.0009 from step 21 on"


def test_statistics_that_are_lost_and_caches_that_are_added() -> None:
    def buffers(*shapes: str) -> Proof:
        groups = (ADAM, BUFFERS._replace(shapes=shapes))
        return verdict(lambda number, step: replace(step, learned=groups) if number == 0 else step)

    assert buffers().text == "buffer 0.norm.running_mean [8] is missing from step 1 on"
    assert buffers(*BUFFERS.shapes, "0.mask [8, 8]").standing == "identical"


def louder(times: float, *, once: bool = False) -> Change:
    def change(number: int, step: ProofStep) -> ProofStep:
        return replace(step, losses=(step.losses[0] * times,)) if not once or number == 10 else step

    return change


def test_another_loss() -> None:
    assert verdict(louder(1 + 1e-6)).standing == "equivalent"
    proof = verdict(louder(1.0004))
    assert proof.text.startswith(
        "step 1: the loss is another one, though from the same weights: 2 became 2.0008 (+0.04%"
    )
    assert verdict(louder(1.00005, once=True)).standing == "equivalent"
    assert verdict(louder(1.01, once=True)).standing == "failed"
    assert verdict(louder(math.inf)).standing == "failed"


def test_two_losses_that_become_one() -> None:
    proof = verdict(from_step(0, losses=(1.0, 1.0)))
    assert proof.text == "step 1 has 2 backward passes, not 1"


def test_a_loss_that_differs_only_between_the_meetings_is_the_fault_of_the_update() -> None:
    """As of a loss of which a part was detached: the number stays, and what is learned from it does not."""

    def between(number: int, step: ProofStep) -> ProofStep:
        fresh = number == 0 or (number % EVERY == 0 and number > 9)
        return step if fresh else replace(step, losses=(step.losses[0] * 1.01,))

    proof = same_training(run(), replace(run(between), drifts=(drift(apart=0.5),)))
    assert proof.text == "from the same weights, conv.weight is 50.0% of its way off after a few steps"
    assert verdict(between).text.startswith("step 2: the loss is another one: ")


@pytest.mark.parametrize(
    ("moved", "standing"),
    [
        ({"apart": 1e-3}, "equivalent"),
        ({"apart": 0.01}, "failed"),
        ({"apart": math.inf}, "failed"),
        ({"dims": 1, "apart": 1.4, "coherence": 1.0}, "identical"),  # rounding alone moves it
        ({"dims": 1, "apart": 1.4, "coherence": 1.0, "learned": False}, "failed"),
        ({"dims": 1, "apart": 1.0, "coherence": 1.0, "length": 0.0}, "failed"),
    ],
)
def test_updates(moved: dict[str, Any], standing: str) -> None:
    assert same_training(run(), replace(run(), drifts=(drift(**moved),))).standing == standing


def test_what_the_machine_alone_makes_differ_is_allowed_threefold() -> None:
    noisy, more = (replace(run(louder(1 + much)), drifts=(drift(apart=much),)) for much in (0.01, 0.05))
    assert same_training(run(), noisy).standing == "failed"
    assert same_training(run(), noisy, noisy).standing == "equivalent"
    assert same_training(run(), more, noisy).standing == "failed"


def test_a_command_that_is_another_each_time_proves_nothing() -> None:
    again = run(from_step(2, indices=((1, 2),)))
    proof = same_training(run(), run(from_step(2, indices=((1, 3),))), again)
    assert proof.standing == "not proven"
    assert proof.text.startswith("what it is compared with differs from itself, run again: batch 3")


def test_every_rank_is_compared() -> None:
    (good,), (other,) = run().proof, run(from_step(0, losses=(1.0, 1.0))).proof
    proof = same_training(replace(run(), proof=(good, good)), replace(run(), proof=(good, other)))
    assert proof.text == "rank 1: step 1 has 2 backward passes, not 1"


def test_too_little_proves_nothing() -> None:
    short = replace(run(), asked=10, proof=(run().proof[0][:10],))
    assert same_training(short, short).text == "only 10 steps were compared, 20 are needed"
    blind = run(from_step(0, inputs=(), contents=(), moved=None, evaluation=None))
    assert same_training(blind, blind).standing == "not proven"
    assert same_training(run(), blind).text.startswith("what reaches the model cannot be seen with it")
    assert same_training(run(), replace(run(), code=1)).standing == "not proven"
    assert same_training(run(), replace(run(), proof=(run().proof[0][:30],))).text == (
        "training ends after 30 steps instead of 40"
    )
