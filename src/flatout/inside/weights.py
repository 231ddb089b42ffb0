"""Two runs of a proof side by side: every few steps one goes on from the other's weights.

    leads ── weights, buffers and the optimizer's state ──► a file every five steps
    follows ── how far have mine come since the last one, and which way, beside the leader's? ── then takes the leader's

What rounding makes of a weight is nothing at first, and in some trainings everything after two hundred steps, whoever
rounded. From the same weights on it is five steps old at the most: what is left to see is what a change does. What a
change does again and again in the same way (a layer that no longer learns, a decay that is lost) adds up over the
meetings, and what rounding does cancels out.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_crc32_options, load, save, set_crc32_options  # before a script puts others there

from flatout.launch.protocol import WEIGHTS_EVERY, WEIGHTS_OVER, Trial
from flatout.redact import redact_text

_SELDOM = 10  # times WEIGHTS_EVERY: further apart they say nothing of sixty steps
_MOST_STEPS = 220  # of a run, that is to be reckoned with
_LOOK_EVERY_S = 0.02
_PATIENCE_S = 300.0

# How far a run's weights have come, in terms of how far those of another have, and how much in the same direction (a
# cosine).
Moved = tuple[float, float]


class Weights:
    """Those of this rank, told to who follows and taken from who leads. What goes wrong ends that, and nothing else.

    `ranks` are this one and how many there are: not known before they have found each other.
    """

    def __init__(self, trial: Trial, ranks: Callable[[], tuple[int, int]]) -> None:
        self._leads = trial.leads
        self._follows = trial.follows
        self._most_bytes = trial.weights_bytes
        self._patience_s = trial.timeout_s or _PATIENCE_S
        self._ranks = ranks
        self._steps = 0
        self._next = WEIGHTS_EVERY
        self._every: int | None = None
        self._began: list[Any] | None = None  # where leader and follower were together last
        self._drifts: list[_Drift] = []

    def step_ended(self, optimizers: Iterable[Any], roots: Iterable[Any]) -> Moved | None:
        """A training step is over: every now and then, where this run has come to."""
        self._steps += 1
        if self._steps != self._next or (self._leads is None and self._follows is None):
            return None
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            self._next += 1
            return None
        try:
            with _by_one_thread():
                return self._meet(_State(optimizers, roots))
        except Exception as problem:
            self._leads = self._follows = None
            reason = redact_text(f"{type(problem).__name__}: {problem}")
            print(f"flatout: weights are not compared ({reason})", file=sys.stderr)
            return None

    def drifts(self) -> list[dict[str, Any]]:
        """Tensor by tensor, what has added up over the meetings."""
        moving = [drift for drift in self._drifts if drift.lengths]
        usual = statistics.median(drift.pace for drift in moving) if moving else 1.0
        return [drift.told(usual) for drift in moving]

    def _meet(self, mine: _State) -> Moved | None:
        moved, came = None, None
        theirs = self._theirs()
        if theirs is not None:
            came = _on_host(mine.weights)
            if self._began is not None:
                named = zip(mine.names, came, strict=True)
                self._drifts = self._drifts or [_Drift(name, len(weight.shape)) for name, weight in named]
                moved = self._moved(self._began, theirs["came"], came)
            self._every, self._began = theirs["every"], theirs["weights"]
            mine.take(theirs)
        elif self._every is None and self._leads is not None:
            self._every = self._affordable(mine.bytes)
        if self._leads is not None:
            self._write(self._leads, mine, came)
        self._next += self._every or 0
        return moved

    def _moved(self, began: list[Any], theirs: list[Any], mine: list[Any]) -> Moved | None:
        """Of all weights; None where the leader has not moved at all."""
        they_went = we_went = along = 0.0
        for drift, start, their, my in zip(self._drifts, began, theirs, mine, strict=True):
            they, we = ((end.float() - start.float()).flatten() for end in (their, my))
            if they.isfinite().all() and (we.isfinite().all() or start.isfinite().all()):  # a mask has infinite ones
                sums = drift.add(they, we.nan_to_num())
                they_went, we_went, along = they_went + sums[0], we_went + sums[1], along + sums[2]
        if not they_went:
            return None
        return math.sqrt(we_went / they_went), along / math.sqrt(we_went * they_went) if we_went else 0.0

    def _affordable(self, size: int) -> int | None:
        """How many steps apart files of that size may be; None where they are too large to be written at all."""
        times = math.ceil(_MOST_STEPS / WEIGHTS_EVERY * size * self._ranks()[1] / max(1, self._most_bytes))
        return WEIGHTS_EVERY * times if times <= _SELDOM else None

    def _write(self, folder: Path, mine: _State, came: list[Any] | None) -> None:
        path = self._path(folder, self._ranks()[0])
        weights = _on_host(mine.weights) if self._every is not None else []
        rest = mine.rest if self._every is not None else {}
        told = {"every": self._every, "came": came or weights, "weights": weights, **rest}
        part = path.with_suffix(f".{os.getpid()}.part")
        checked = get_crc32_options()
        set_crc32_options(False)  # which would take most of the time
        try:
            save(told, part)
            os.replace(part, path)  # noqa: PTH105 - a script's own pathlib is none of ours
        finally:
            set_crc32_options(checked)
            part.unlink(missing_ok=True)

    def _theirs(self) -> dict[str, Any] | None:
        """What the leader had at this step; None where it has come to its end before, or there is none. All of its
        ranks have to be there: where one of them has failed, ours would part."""
        if self._follows is None:
            return None
        rank, world = self._ranks()
        files = [self._path(self._follows, other) for other in range(world)]
        until_s = time.monotonic() + self._patience_s
        while True:
            over = (self._follows / WEIGHTS_OVER).exists() or time.monotonic() > until_s
            if all(file.exists() for file in files):
                break
            if over:
                self._follows = None
                return None
            time.sleep(_LOOK_EVERY_S)
        theirs: dict[str, Any] = load(files[rank], map_location="cpu", weights_only=True)
        if theirs["every"] is None:
            self._follows = None
        return theirs if theirs["every"] is not None else None

    def _path(self, folder: Path, rank: int) -> Path:
        return folder / f"{rank:05d}-{self._steps:05d}.pt"


@dataclass(slots=True)
class _Drift:
    """What has become of one tensor, meeting by meeting: the leader's way, and how far ours was from it each time."""

    name: str
    dims: int
    way: Any = None
    apart: Any = None
    squares: float = 0.0
    went: float = 0.0
    lengths: list[float] = field(default_factory=list)

    def add(self, they: Any, we: Any) -> tuple[float, float, float]:
        """One meeting more; how far they went and we went, squared, and how far along each other."""
        apart = we - they
        they_went, we_went, along = (float(torch.dot(a, b).double()) for a, b in ((they, they), (we, we), (they, we)))
        self.way = they if self.way is None else self.way + they
        self.apart = apart if self.apart is None else self.apart + apart
        self.squares += float(torch.dot(apart, apart))
        self.went += they_went
        if they_went:
            self.lengths.append(math.sqrt(we_went / they_went))
        return they_went, we_went, along

    @property
    def pace(self) -> float:
        """How far one of the leader's numbers went, typically, in all."""
        return math.sqrt(self.went / self.way.numel())

    def told(self, usual: float) -> dict[str, Any]:
        """In plain figures: how far off in the end, as a share of the way; how many times as far as it would be if each
        time were by chance; and the leader's pace, in terms of what is usual."""
        apart, way = float(self.apart.norm()), float(self.way.norm())
        return {
            "name": self.name,
            "size": self.way.numel(),
            "dims": self.dims,
            "drift": apart / way if way else 0.0,
            "coherence": apart / math.sqrt(self.squares) if self.squares else 0.0,
            "length": statistics.median(self.lengths),
            "pace": self.pace / usual,
        }


class _State:
    """All that a training process learns: what its optimizers train and remember, and its models' buffers."""

    def __init__(self, optimizers: Iterable[Any], roots: Iterable[Any]) -> None:
        models = list(roots)
        known = {id(p): name for root in models for name, p in root.named_parameters()}
        trained = [(o, p) for o in optimizers for group in o.param_groups for p in group["params"]]
        self.names = [known.get(id(p), f"parameter {number}") for number, (_, p) in enumerate(trained)]
        self.weights = [_local(p) for _, p in trained]
        self._remembered = [o.state.get(p, {}) for o, p in trained]
        self._buffers = [_local(b) for root in models for b in root.buffers()]

    @property
    def bytes(self) -> int:
        """Of it all; an optimizer that remembers nothing may not have stepped yet, since a scale was too large."""
        remembered = [_local(v) for state in self._remembered for v in state.values() if isinstance(v, torch.Tensor)]
        known, more = _bytes((*self.weights, *self._buffers)), _bytes(remembered)
        return known + (more or 2 * known)

    @property
    def rest(self) -> dict[str, Any]:
        """What is not weights, as a file can hold it."""
        remembered = [{k: _plain(v) for k, v in state.items() if _is_plain(v)} for state in self._remembered]
        return {"buffers": _on_host(self._buffers), "remembered": remembered}

    @torch.no_grad()
    def take(self, theirs: dict[str, Any]) -> None:
        """Go on from another's. In place, since graphs and views know where things lie; and unseen by autograd, which
        may not be through with them: a generator's step comes after its critic's."""
        for mine, their in zip(self.weights, theirs["weights"], strict=True):
            mine.data.copy_(their)
        for mine, their in zip(self._buffers, theirs["buffers"], strict=True):
            if mine.numel() <= 1 or 0 not in mine.stride():  # one that is expanded has nothing of its own
                mine.data.copy_(their)
        for state, their in zip(self._remembered, theirs["remembered"], strict=True):
            for key in state.keys() & their.keys():
                if isinstance(state[key], torch.Tensor):
                    _local(state[key]).copy_(torch.as_tensor(their[key], device="cpu"))
                else:
                    state[key] = type(state[key])(their[key])


@contextmanager
def _by_one_thread() -> Iterator[None]:
    """Runs side by side leave no core free, and threads that wait for each other in turn would make it ten times as
    long."""
    usual = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(usual)


def _bytes(tensors: Iterable[Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _on_host(tensors: Iterable[Any]) -> list[Any]:
    return [tensor.detach().to("cpu", copy=True) for tensor in tensors]


def _local(tensor: Any) -> Any:
    """This rank's part of one that is spread over several."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor | int | float)


def _plain(value: Any) -> Any:
    return _on_host([_local(value)])[0] if isinstance(value, torch.Tensor) else value
