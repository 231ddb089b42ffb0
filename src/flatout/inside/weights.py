"""Two runs of a proof side by side: every few steps one goes on from the other's weights.

    leader ── weights, buffers and the optimizer's state ──► a file every five steps
    follower ── compares how far its weights moved since the last file, and in which direction ── takes the leader's

In five steps rounding changes a weight by nearly nothing, and over the meetings that cancels out. An
error that a change makes again and again (a layer that no longer learns, a weight decay that is lost)
adds up.
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

# Imported now: a script may replace them later.
from torch.serialization import get_crc32_options, load, save, set_crc32_options

from flatout.launch.protocol import WEIGHTS_EVERY, WEIGHTS_OVER, Trial
from flatout.redact import redact_text

_MAX_TIMES = 10  # times WEIGHTS_EVERY: further apart they say nothing about sixty steps
_EXPECTED_STEPS = 220  # in a run, at most
_LOOK_EVERY_S = 0.02
_TIMEOUT_S = 300.0

# How far a run's weights moved, as a share of how far another's did; the cosine between the two directions.
Moved = tuple[float, float]


class Weights:
    """The weights of this rank, written for the follower and taken from the leader. An error ends
    that, nothing else.

    `ranks` gives this rank and how many there are, as torch knows them later.
    """

    def __init__(self, trial: Trial, ranks: Callable[[], tuple[int, int]]) -> None:
        self._leads = trial.leads
        self._follows = trial.follows
        self._most_bytes = trial.weights_bytes
        self._closely = trial.closely  # buffers are compared, too
        self._timeout_s = trial.timeout_s or _TIMEOUT_S
        self._ranks = ranks
        self._steps = 0
        self._next = WEIGHTS_EVERY
        self._every: int | None = None
        self._began: list[Any] | None = None  # the weights at the last meeting
        self._drifts: list[_Drift] = []
        self._buffers: list[str] | None = None  # those that are compared

    def step_ended(self, optimizers: Iterable[Any], roots: Iterable[Any]) -> Moved | None:
        """A training step is over; every few steps, how far the weights have moved."""
        self._steps += 1
        if self._steps != self._next or (self._leads is None and self._follows is None):
            return None
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            self._next += 1
            return None
        try:
            with _one_thread():
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
        # One that the leader does not train may move here.
        told = [drift for drift in self._drifts if drift.way is not None] if self._closely else moving
        return [drift.figures(usual) for drift in told]

    def _meet(self, mine: _State) -> Moved | None:
        moved, reached = None, None
        theirs = self._theirs()
        if theirs is not None:
            reached = _on_host(mine.weights)
            buffers = self._buffers_to_compare(mine, theirs)
            if self._began is not None:
                self._drifts = self._drifts or _drifts(mine, reached, buffers)
                came = [*theirs["came"], *(theirs["buffers"][name] for name in buffers)]
                ours = [*reached, *_on_host(mine.buffers[name] for name in buffers)]
                moved = self._moved(self._began, came, ours)
            self._every = theirs["every"]
            self._began = [*theirs["weights"], *(theirs["buffers"][name] for name in buffers)]
            mine.take(theirs)
        elif self._every is None and self._leads is not None:
            self._every = self._affordable(mine.bytes)
        if self._leads is not None:
            self._write(self._leads, mine, reached)
        self._next += self._every or 0
        return moved

    def _buffers_to_compare(self, mine: _State, theirs: dict[str, Any]) -> list[str]:
        """Those that both have, at the first meeting and at this one."""
        if not self._closely:
            return []
        if self._buffers is None:
            self._buffers = sorted(name for name in mine.buffers if name in theirs["buffers"])
        return self._buffers

    def _moved(self, began: list[Any], theirs: list[Any], mine: list[Any]) -> Moved | None:
        """Over all weights; None where the leader has not moved at all."""
        sums = torch.zeros(3, dtype=torch.float64)
        for drift, start, their, my in zip(self._drifts, began, theirs, mine, strict=True):
            they = (their.float() - start.float()).flatten()
            we = (my.float() - start.float()).flatten()
            # Masks have infinite numbers; weights that became infinite here count.
            if they.isfinite().all() and (we.isfinite().all() or start.isfinite().all()):
                sums += drift.add(they, we.nan_to_num())
        their_square, our_square, product = sums.tolist()
        if not their_square:
            return None
        if not our_square:
            return 0.0, 0.0
        return math.sqrt(our_square / their_square), product / math.sqrt(our_square * their_square)

    def _affordable(self, size: int) -> int | None:
        """How many steps apart files of this size have to be; None where they are too large."""
        files = _EXPECTED_STEPS / WEIGHTS_EVERY
        times = math.ceil(files * size * self._ranks()[1] / max(1, self._most_bytes))
        return WEIGHTS_EVERY * times if times <= _MAX_TIMES else None

    def _write(self, folder: Path, mine: _State, reached: list[Any] | None) -> None:
        path = self._path(folder, self._ranks()[0])
        content: dict[str, Any] = {"every": None, "came": reached or [], "weights": []}
        if self._every is not None:
            weights = _on_host(mine.weights)
            content = {"every": self._every, "came": reached or weights, "weights": weights, **mine.rest}
        part = path.with_suffix(f".{os.getpid()}.part")
        checked = get_crc32_options()
        set_crc32_options(False)  # it would take most of the time
        try:
            save(content, part)
            os.replace(part, path)  # noqa: PTH105 - a script may have patched pathlib
        finally:
            set_crc32_options(checked)
            part.unlink(missing_ok=True)

    def _theirs(self) -> dict[str, Any] | None:
        """What the leader had at this step; None where it ended before, or there is no leader.

        It waits for the files of all ranks: ours would go on from different weights.
        """
        if self._follows is None:
            return None
        rank, world = self._ranks()
        files = [self._path(self._follows, other) for other in range(world)]
        until_s = time.monotonic() + self._timeout_s
        over = False
        while not all(file.exists() for file in files):
            if over:
                self._follows = None
                return None
            over = (self._follows / WEIGHTS_OVER).exists() or time.monotonic() > until_s
            time.sleep(_LOOK_EVERY_S)
        theirs: dict[str, Any] = load(files[rank], map_location="cpu", weights_only=True)
        if theirs["every"] is not None:
            return theirs
        self._follows = None
        return None

    def _path(self, folder: Path, rank: int) -> Path:
        return folder / f"{rank:05d}-{self._steps:05d}.pt"


@dataclass(slots=True)
class _Drift:
    """One tensor over all meetings: how far the leader's moved, and the difference to ours."""

    name: str
    dims: int
    learned: bool
    way: Any = None  # the sum of the leader's movements
    difference: Any = None  # the sum of the differences
    difference_square: float = 0.0
    way_square: float = 0.0
    lengths: list[float] = field(default_factory=list)

    def add(self, they: Any, we: Any) -> Any:
        """Add a meeting. Returns the squares of both movements, and their product."""
        difference = we - they
        sums = torch.stack([they.dot(they), we.dot(we), they.dot(we)]).double()
        if self.way is None:
            self.way, self.difference = torch.zeros_like(they), torch.zeros_like(they)
        self.way, self.difference = self.way + they, self.difference + difference
        self.difference_square += float(difference.dot(difference))
        self.way_square += float(sums[0])
        if sums[0]:
            self.lengths.append(math.sqrt(sums[1] / sums[0]))
        return sums

    @property
    def pace(self) -> float:
        """How far one of the leader's numbers moved, typically, over all meetings."""
        return math.sqrt(self.way_square / self.way.numel())

    @property
    def _apart(self) -> float:
        """How far off it was after each meeting, over all of them."""
        if self.way_square:
            return math.sqrt(self.difference_square / self.way_square)
        return math.inf if self.difference_square else 0.0

    def figures(self, usual: float) -> dict[str, Any]:
        """How far off in the end, as a share of the way, and how many times as far as by chance; the
        leader's pace, as a multiple of the usual one."""
        difference, way = float(self.difference.norm()), float(self.way.norm())
        return {
            "name": self.name,
            "size": self.way.numel(),
            "dims": self.dims,
            "drift": difference / way if way else 0.0,
            "coherence": difference / math.sqrt(self.difference_square) if self.difference_square else 0.0,
            "length": statistics.median(self.lengths) if self.lengths else 0.0,
            "pace": self.pace / usual,
            "apart": self._apart,
            "learned": self.learned,
        }


class _State:
    """What a training process learns: the weights its optimizers train, their state, and its models'
    buffers."""

    def __init__(self, optimizers: Iterable[Any], roots: Iterable[Any]) -> None:
        models = list(roots)
        known = {id(p): name for root in models for name, p in root.named_parameters()}
        trained = [(o, p) for o in optimizers for group in o.param_groups for p in group["params"]]
        self.names = [known.get(id(p), f"parameter {number}") for number, (_, p) in enumerate(trained)]
        self.weights = [_local(p) for _, p in trained]
        self._optimizer_states = [o.state.get(p, {}) for o, p in trained]
        self.buffers = {name: _local(buffer) for name, buffer in named_buffers(models)}

    @property
    def bytes(self) -> int:
        """The size of it all; an optimizer without a state may not have stepped yet."""
        values = [value for state in self._optimizer_states for value in state.values()]
        states = _bytes(_local(value) for value in values if isinstance(value, torch.Tensor))
        known = _bytes((*self.weights, *self.buffers.values()))
        return known + (states or 2 * known)

    @property
    def rest(self) -> dict[str, Any]:
        """Everything but the weights, as a file can hold it."""
        buffers = dict(zip(self.buffers, _on_host(self.buffers.values()), strict=True))
        return {"buffers": buffers, "remembered": [_plain(state) for state in self._optimizer_states]}

    @torch.no_grad()
    def take(self, theirs: dict[str, Any]) -> None:
        """Go on from another's: in place, as graphs and views hold the memory; and unseen by
        autograd, which may need the old version where a generator steps after its critic."""
        for mine, their in zip(self.weights, theirs["weights"], strict=True):
            mine.data.copy_(their)
        for name, their in theirs["buffers"].items():
            mine = self.buffers.get(name)
            if mine is None or mine.shape != their.shape:
                continue
            if mine.numel() <= 1 or 0 not in mine.stride():  # an expanded one has no memory of its own
                mine.data.copy_(their)
        for state, their in zip(self._optimizer_states, theirs["remembered"], strict=True):
            for key in state.keys() & their.keys():
                if isinstance(state[key], torch.Tensor):
                    _local(state[key]).copy_(torch.as_tensor(their[key], device="cpu"))
                else:
                    state[key] = type(state[key])(their[key])


def named_buffers(roots: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """The buffers of models, by names that torch.compile does not change."""
    for number, root in enumerate(roots):
        for name, buffer in root.named_buffers():
            yield f"{number}.{name.replace('_orig_mod.', '')}", buffer


def _drifts(mine: _State, weights: list[Any], buffers: Iterable[str]) -> list[_Drift]:
    """Nothing has moved yet."""
    learned = [_Drift(name, weight.dim(), True) for name, weight in zip(mine.names, weights, strict=True)]
    return [*learned, *(_Drift(name.partition(".")[2], mine.buffers[name].dim(), False) for name in buffers)]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Runs side by side leave no core free: with several threads it would take ten times as long."""
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
    """This rank's part of a tensor that is spread over several."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """The tensors and numbers of an optimizer's state, on the host."""
    numbers = {key: value for key, value in state.items() if isinstance(value, int | float)}
    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    return numbers | {key: _on_host([_local(value)])[0] for key, value in tensors.items()}
