"""Copies made ahead of time: one of a host batch that may have been written to since is worth nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from flatout.inject.apply import loading

PATCHED = ("to", "cuda", "numpy", "__array__", "__dlpack__")


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[loading._Copies]:
    before = {name: getattr(torch.Tensor, name) for name in PATCHED}
    monkeypatch.setattr(loading, "_copies", loading._Copies())
    loading._answer_with_copies()
    yield loading._copies
    for name, method in before.items():
        setattr(torch.Tensor, name, method)


@pytest.mark.parametrize("look", [lambda host: host.numpy(), np.asarray, np.from_dlpack])
def test_memory_that_is_given_out_is_copied_anew(copies: loading._Copies, look: Callable[[Any], Any]) -> None:
    host, other = torch.ones(3), torch.ones(3)
    for tensor in (host, other):
        copies.put(tensor, torch.ones(3, device="meta"), None)
    look(other)
    assert [*copies._made] == [id(host)]
