"""Attention written out by hand: a softmax over the last side of a square of T×T scores, and the line it is called in.

It looks after the first step, for a few steps, and only where nothing is compiled: a compiler that has seen our wrapper
would compile again when it is taken off.
"""

from __future__ import annotations

from typing import Any

import torch

from flatout.inside.patches import Patches, Stage
from flatout.inside.run_facts import compiled_frames
from flatout.inside.stacks import caller
from flatout.model.records import WrittenAttention

_SOFTMAX = ("torch.softmax", "torch.Tensor.softmax", "torch.nn.functional.softmax")
_SCRIPTED = ("torch.jit._script.get_jit_def", "torch.jit._recursive.get_jit_def")  # script itself counts its callers
_STEPS = 3
_MIN_LENGTH = 128  # below this the scores are small


class AttentionWatch:
    """Watches softmax from the end of the first step on; `found` is the longest attention it has met."""

    def __init__(self, patches: Patches) -> None:
        self.found: WrittenAttention | None = None
        self._softmax = patches.subscriber(Stage.OBSERVE, self._failed)
        self._compilers = patches.subscriber(Stage.OBSERVE, self._failed)
        self._steps = 0
        self._compilers.before("torch.compile", self._compiles)

    @property
    def wants_every_step(self) -> bool:
        """Whether it is to be told when each step ends."""
        return not self._compilers.off

    def step_ended(self) -> None:
        """A training step is over."""
        if not self._compilers.off:
            self._compilers.guarded(self._begin_or_end)

    def _begin_or_end(self) -> None:
        if compiled_frames() or self._steps >= _STEPS:
            self.leave()
        elif not self._steps:
            for softmax in _SOFTMAX:
                self._softmax.before(softmax, self._look)
            for scripted in _SCRIPTED:
                self._compilers.before(scripted, self._compiles)
        self._steps += 1

    def leave(self) -> None:
        """Look no more."""
        self._softmax.leave()
        self._compilers.leave()

    def _compiles(self, *_: Any, **__: Any) -> None:
        self.leave()

    def _look(self, scores: Any, dim: Any = None, *_: Any, **__: Any) -> None:
        if not isinstance(scores, torch.Tensor) or scores.dim() < 3 or not scores.is_floating_point():
            return
        length = scores.shape[-1]
        if length < _MIN_LENGTH or scores.shape[-2] != length or dim not in (-1, scores.dim() - 1):
            return
        where = caller() if self.found is None or length > self.found.length else None
        if where is not None:
            self.found = WrittenAttention(where=where, length=length)

    def _failed(self, _: Exception) -> None:
        """What goes wrong ends the looking, and nothing else."""
        self.leave()
