"""What became of a loader so far, and of the samples it could not load."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flatout.model.errors import FlatoutError

# Attributes under which datasets keep their files, as people call them.
_PATH_LISTS = ("samples", "imgs", "paths", "files", "image_paths", "filenames", "image_files", "items")


@dataclass(frozen=True, slots=True, kw_only=True)
class BadSample:
    """A sample that was left out or gave up on: its index, its file where the dataset shows one, and why."""

    index: Any
    name: str | None
    why: str


class BadSampleError(FlatoutError, RuntimeError):
    """A sample kills every worker that touches it."""

    def __init__(self, bad: BadSample) -> None:
        self.bad = bad
        name = f" ({bad.name})" if bad.name else ""
        super().__init__(
            f"sample {bad.index}{name} cannot be loaded: {bad.why}. "
            "Leave such samples out with DataLoader(..., on_bad_sample='skip')"
        )


@dataclass(slots=True)
class Account:
    """What became of a loader so far."""

    batches: int = 0  # the consumer has got
    parts: int = 0  # of batches, or whole ones, that workers have made
    deaths: int = 0  # of workers
    redone: int = 0  # parts that somebody died over
    drew: bool = False  # samples were seen to draw random numbers
    fills: str | None = None  # what of the dataset they were seen to fill
    bad: list[BadSample] = field(default_factory=list)


def name_of(dataset: Any, index: Any) -> str | None:
    """The file behind a sample, if the dataset keeps a list of them."""
    try:
        while hasattr(dataset, "dataset") and hasattr(dataset, "indices"):  # a Subset
            dataset, index = dataset.dataset, dataset.indices[index]
        for attribute in _PATH_LISTS:
            files = getattr(dataset, attribute, None)
            if files is not None and not callable(files):
                entry = files[index]
                for part in entry if isinstance(entry, (tuple, list)) else [entry]:
                    if isinstance(part, (str, Path)):
                        return str(part)
    except Exception:  # user code may do anything here, and a name is only a courtesy
        pass
    return None


def out_of_memory_kills() -> int:
    """How many processes the kernel has killed for memory so far, in this control group or on this machine."""
    for path, key in (("/sys/fs/cgroup/memory.events", "oom_kill"), ("/proc/vmstat", "oom_kill")):
        try:
            for line in Path(path).read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == key:
                    return int(value)
        except (OSError, ValueError):
            continue
    return 0
