"""Philox4x32-10: random words that are a function of a counter and a key, so anybody can compute any of them.

The counter of every number we draw is (sample index, epoch, operation), its key the seed. Integers only: torch here and
Triton's `tl.philox` on the GPU give the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def philox(index: Tensor, high: Tensor | int, key: Tensor | int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random 32-bit words (held in int64) for each element; 128 bits of counter, 64 of key."""
    zero = torch.zeros_like(index)
    counter, key = zero + high, zero + key
    c0, c1, c2, c3 = index & _MASK, (index >> 32) & _MASK, counter & _MASK, (counter >> 32) & _MASK
    k0, k1 = key & _MASK, (key >> 32) & _MASK
    for _ in range(10):
        first, second = 0xD2511F53 * c0, 0xCD9E8D57 * c2  # int64 wraps; the 64 bits are those of the unsigned product
        c0, c1, c2, c3 = (
            (second >> 32 & _MASK) ^ c1 ^ k0,
            second & _MASK,
            (first >> 32 & _MASK) ^ c3 ^ k1,
            first & _MASK,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def uniform(word: Tensor) -> Tensor:
    """A 32-bit word as a float64 in [0, 1): its upper 24 bits, so that float32 holds it exactly."""
    return (word >> 8).to(torch.float64) / 2**24


def normal(radius: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    """Two independent standard normal numbers out of two words (Box and Muller), in float32."""
    length = (-2 * torch.log((uniform(radius) + 2**-25).float())).sqrt()
    turn = uniform(angle).float() * (2 * torch.pi)
    return length * torch.cos(turn), length * torch.sin(turn)
