"""Counter-based random numbers: Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

A draw is a pure function of (seed, stream, block, step, position, lane): every backend, batch size and rank draws
the same number for the same place, and nothing has to be carried along. Words are kept in int64 tensors as values in
[0, 2^32); int64 products wrap modulo 2^64, which is exactly what the 32x32 -> 64 bit multiplication needs.

Counter words: (lane, position, step, 4 * block + stream); key words: the low and high half of the 64-bit seed.
"""

from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85


class Stream(IntEnum):
    """Independent families of draws within one decoding run.

    At most four: they share a counter word with the block.
    """

    CANVAS = 0
    RENOISE = 1
    CANDIDATE = 2


def philox(c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, k0: Tensor, k1: Tensor, rounds: int = 10):
    """The four output words of Philox-4x32 for broadcastable int64 counter and key tensors with values in [0, 2^32)."""
    for _ in range(rounds):
        product0, product1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        high0, high1 = (product0 >> 32) & _MASK, (product1 >> 32) & _MASK
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, product1 & _MASK, high0 ^ c3 ^ k1, product0 & _MASK
        k0, k1 = (k0 + _WEYL_0) & _MASK, (k1 + _WEYL_1) & _MASK
    return c0, c1, c2, c3


class DrawSource(Protocol):
    """Where decoders get their randomness from; `block_B` and `step_B` are int64 [B] tensors."""

    def tokens(self, stream: Stream, block_B: Tensor, step_B: Tensor, length: int, vocab_size: int) -> Tensor:
        """Uniform token ids in [0, vocab_size), int64 [B, length]."""
        ...

    def uniform(self, stream: Stream, block_B: Tensor, step_B: Tensor, length: int, lanes: int) -> Tensor:
        """Uniform numbers in the open interval (0, 1), float32 [B, length, lanes]."""
        ...


class CounterRng:
    """The project's DrawSource: Philox keyed by one 64-bit seed per row.

    seed_B: int64 [B]. Negative seeds are allowed (their two's complement is the key).
    """

    def __init__(self, seed_B: Tensor) -> None:
        self.seed_B = seed_B

    def _words(self, stream: Stream, block_B: Tensor, step_B: Tensor, length: int, lanes: int):
        device = self.seed_B.device
        row = (-1, 1, 1)
        key_low, key_high = (self.seed_B & _MASK).view(row), ((self.seed_B >> 32) & _MASK).view(row)
        lane = torch.arange(lanes, device=device).view(1, 1, lanes)
        position = torch.arange(length, device=device).view(1, length, 1)
        block = ((block_B * 4 + int(stream)) & _MASK).view(row)
        return philox(lane, position, step_B.view(row), block, key_low, key_high)

    def tokens(self, stream: Stream, block_B: Tensor, step_B: Tensor, length: int, vocab_size: int) -> Tensor:
        word = self._words(stream, block_B, step_B, length, 1)[0]
        return ((word * vocab_size) >> 32).squeeze(-1)

    def uniform(self, stream: Stream, block_B: Tensor, step_B: Tensor, length: int, lanes: int) -> Tensor:
        words = torch.stack(self._words(stream, block_B, step_B, length, -(-lanes // 4)), -1)
        # 23 bits and a half are exact in float32; with 24 the largest draw would round to 1, its Gumbel noise to inf.
        bits = words.flatten(-2)[..., :lanes] >> 9
        return (bits.float() + 0.5) * 2.0**-23
