"""How many tokens a sample has, and how many of them are padding: counted in a few batches as they come from a loader.

Looked at are batches with `attention_mask` or `input_ids` in them, on the CPU, and of a large one only some rows. A
look takes some 50 µs at the most.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from flatout.model.records import TokenFacts

_AT_FIRST = 16  # batches of a loader, each of them looked at
_LATER_EVERY = 64
_MOST_TOKENS = 1 << 12  # of a batch
_LONGEST = 1 << 14  # tokens of a row: a longer one takes too long to look at
_IGNORED = -100  # the label that a loss leaves out
_IDS, _MASK, _LABELS = "input_ids", "attention_mask", "labels"


class TokenCounts:
    """Counts by loader, over the batches that were looked at."""

    def __init__(self) -> None:
        self._asked: dict[int, int] = {}
        self._counts: dict[int, list[float]] = {}  # samples, tokens; of those where padding shows: tokens, padding
        self._off = False

    def wants(self, loader: int, batch: Any) -> bool:
        """Whether this batch is one to look at."""
        if self._off or _fields(batch) is None:
            return False
        asked = self._asked[loader] = self._asked.get(loader, 0) + 1
        return asked <= _AT_FIRST or asked % _LATER_EVERY == 0

    def look(self, loader: int, batch: Any) -> None:
        """Count what is in a batch. What goes wrong ends the counting, and nothing else."""
        try:
            self._count(loader, _fields(batch) or {})
        except Exception:
            self._off = True

    def of(self, loader: int) -> TokenFacts | None:
        """What is known of a loader's batches."""
        samples, tokens, shown, padding = self._counts.get(loader, [0.0] * 4)
        if not samples:
            return None
        return TokenFacts(a_sample=tokens / samples, padding=padding / shown if shown else None)

    def _count(self, loader: int, batch: Mapping[str, Any]) -> None:
        ids, mask, labels = (_table(batch.get(name)) for name in (_IDS, _MASK, _LABELS))
        first = next((table for table in (mask, ids, labels) if table is not None), None)
        if first is None:
            return
        counts = self._counts.setdefault(loader, [0.0] * 4)
        counts[0] += first.shape[0]
        counts[1] += first.numel()
        table = mask if mask is not None else labels
        if table is None or table.shape[1] > _LONGEST:
            return
        looked = _some_rows(table)
        if mask is not None:
            padding = looked.numel() - int(looked.count_nonzero())
        else:
            padding = _behind_the_labels(looked)
        counts[2] += first.numel()
        counts[3] += padding / looked.numel() * first.numel()


def _fields(batch: Any) -> Mapping[str, Any] | None:
    """The tensors of a batch by name, where some of them are tokens; they may be the first part of a tuple."""
    if isinstance(batch, (tuple, list)) and batch:
        batch = batch[0]
    if isinstance(batch, Mapping) and (_IDS in batch or _MASK in batch):
        return batch
    return None


def _table(tensor: Any) -> torch.Tensor | None:
    """A plain tensor of whole numbers with samples as rows; None of anything else, or of one that is not at hand."""
    if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return None
    if tensor.is_nested or tensor.dim() != 2 or not tensor.numel() or tensor.is_floating_point():
        return None
    return tensor


def _some_rows(table: torch.Tensor) -> torch.Tensor:
    """Rows spread over the whole of it: a batch may be sorted by length."""
    return table[:: max(1, -(-table.numel() // _MOST_TOKENS))]


def _behind_the_labels(labels: torch.Tensor) -> int:
    """How many tokens follow the last label of a row: those without one before it may be a prompt, or words that were
    not masked. A row without any label counts as full."""
    return int((labels != _IGNORED).view(torch.uint8).flip(1).argmax(1).sum())
