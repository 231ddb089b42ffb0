"""How many tokens of a batch are padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flatout.inside.loaders import TokenCounts
from flatout.model.records import TokenFacts

IDS = torch.ones(2, 8, dtype=torch.long)
MASK = torch.tensor([[1] * 8, [1] * 4 + [0] * 4])
PROMPT = torch.tensor([[-100] * 2 + [5] * 6, [-100] * 3 + [5, -100] + [-100] * 3])  # the second ends after four


def counted(*batches: Any) -> TokenFacts | None:
    counts = TokenCounts()
    for batch in batches:
        if counts.wants(batch):
            counts.look(batch)
    return counts.facts()


@pytest.mark.parametrize(
    ("batch", "padding"),
    [
        ({"input_ids": IDS, "attention_mask": MASK}, 0.25),
        ({"input_ids": IDS, "attention_mask": MASK.bool(), "labels": torch.full((2, 8), -100)}, 0.25),
        (({"input_ids": IDS, "attention_mask": MASK}, torch.zeros(2)), 0.25),
        ({"input_ids": IDS, "labels": PROMPT}, 0.25),
        ({"input_ids": IDS, "labels": torch.tensor([0, 1])}, None),
        ({"input_ids": IDS}, None),
    ],
    ids=["mask", "mask of bools", "in a tuple", "labels behind the last", "labels of samples", "no sign"],
)
def test_padding_is_what_the_mask_or_the_labels_leave_out(batch: Any, padding: float | None) -> None:
    assert counted(batch) == TokenFacts(a_sample=8.0, padding=padding)


@pytest.mark.parametrize(
    "batch",
    [
        [torch.ones(2, 8), torch.ones(2)],
        {"image": torch.ones(2, 8)},
        {"attention_mask": torch.ones(2, 1, 8, 8)},
        {"input_ids": torch.nested.nested_tensor([torch.ones(3), torch.ones(5)], layout=torch.jagged)},
        {"input_ids": torch.ones(2, 8, dtype=torch.long, device="meta")},
        "words",
        None,
    ],
    ids=["images", "names", "mask of four dimensions", "nested", "elsewhere", "text", "nothing"],
)
def test_other_batches_are_not_counted(batch: Any) -> None:
    assert counted(batch) is None


def test_the_first_batches_are_looked_at_and_then_few() -> None:
    counts = TokenCounts()
    asked = [number for number in range(1, 201) if counts.wants({"input_ids": IDS})]
    assert asked == [*range(1, 17), 64, 128, 192]


def test_rows_of_a_large_batch_that_is_sorted_by_length_stand_for_all_of_it() -> None:
    mask = (torch.arange(1000) >= torch.arange(0, 1000).unsqueeze(1)).long()
    known = counted({"attention_mask": mask})
    assert known is not None
    assert known.padding == pytest.approx(0.5, abs=0.05)


def test_what_goes_wrong_ends_the_counting_alone() -> None:
    class Odd(dict[str, Any]):
        def get(self, *_: Any) -> Any:
            raise OSError

    counts = TokenCounts()
    odd = Odd(input_ids=IDS)
    assert counts.wants(odd)
    counts.look(odd)
    assert not counts.wants({"input_ids": IDS})
    assert counts.facts() is None
