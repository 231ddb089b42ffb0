"""Programs as kernels of their own: step by step, each of some thirty reads and writes the whole batch."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from flatout.feed.deferred.program import Program, run

_MOST = 4  # programs that are compiled: pictures, masks, and what chance makes of them
_compile = torch.compile  # before anything times it


class Kernels:
    """Runs programs, compiled for the size of batch that comes first; a last, smaller one goes step by step."""

    def __init__(self) -> None:
        self._compiled: dict[Program, tuple[torch.Size, Callable[[Tensor, Tensor], Tensor]]] = {}
        self.compile_s = 0.0

    @torch.no_grad()
    def __call__(self, program: Program, pixels: Tensor, numbers: Tensor) -> Tensor:
        if program not in self._compiled and len(self._compiled) < _MOST:
            return self._first(program, pixels, numbers)
        shape, compiled = self._compiled.get(program, (None, None))
        if compiled is None or pixels.shape != shape:
            return run(program, pixels, numbers)
        return compiled(pixels, numbers)

    def _first(self, program: Program, pixels: Tensor, numbers: Tensor) -> Tensor:
        def step_by_step(pixels: Tensor, numbers: Tensor) -> Tensor:
            return run(program, pixels, numbers)

        compiled, began = _compile(step_by_step, dynamic=False), time.perf_counter()
        try:
            made = compiled(pixels, numbers)
        except Exception:  # a compiler that is not there, or not up to it: of the steps themselves it is raised again
            compiled, made = step_by_step, step_by_step(pixels, numbers)
        self._compiled[program] = pixels.shape, compiled
        self.compile_s += time.perf_counter() - began
        return made
