"""How each workload is mended by hand: the mark that an automatic fix has to reach.

A workload's own settings first (`Flags`, appended to its command line); an `Edit` of a copy of one of its files only
where no flag reaches the mistake. The workload itself is never touched.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Flags:
    """Flags appended to the command. `{spare}` becomes the cores left when the training process has had two."""

    why: str
    flags: str


@dataclass(frozen=True, slots=True)
class Edit:
    """Text replaced in a copy of a file of the workload's folder; `old` must be there exactly once."""

    why: str
    file: str
    old: str
    new: str


# Workloads whose evaluation and checkpoint are among the mistakes: *before* is measured over a whole epoch, since a
# window that ends earlier would not see them.
WHOLE_EPOCH = {"gray"}

MENDED: dict[str, tuple[Flags | Edit, ...]] = {
    "gray": (
        Flags("decode in every core but the two the training needs", "--num-workers {spare} --persistent-workers"),
        Flags("copy from page-locked memory, so that the copy overlaps the step before", "--pin-memory"),
        Flags("fewer, fuller steps", "--batch-size 128"),
        Flags("look at the validation data when there is something to see", "--eval-every 5 --save-every 5"),
    ),
    "segment": (),
    "captcha": (),
    "video": (),
    "stock": (
        Flags("an LSTM step takes nearly as long for 256 windows as for 1024", "--batch-size 1024"),
        Flags("as many workers as there are cores to run them", "--num-workers {spare}"),
    ),
}
