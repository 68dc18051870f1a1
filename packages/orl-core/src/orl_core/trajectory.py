"""What a rollout captured: the one thing that passes from an engine to the trainer.

Shape legend: S states of one block, C canvas, d width.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class BlockTrace:
    """Every denoising step of one block, in order. A state is what the denoiser consumed at that step.

    canvas      int64  [S, C]     tokens consumed
    z           float  [S, C, d]  residual context consumed, before the adapter (exactly zero at step 0)
    unresolved  bool   [S, C]     the state's own unresolved positions
    entropy     float32 [S, C]    entropy (nats) predicted at this step
    top_prob    float32 [S, C]    probability of the most likely token
    tokens      int64  [C]        the block's final tokens
    block       index of the block in the response
    start       position of the block's first token in prompt + response: its clean context is [0, start)
    """

    canvas: Tensor
    z: Tensor
    unresolved: Tensor
    entropy: Tensor
    top_prob: Tensor
    tokens: Tensor
    block: int
    start: int

    @classmethod
    def uncaptured(cls, steps: int, tokens: Tensor, block: int, start: int) -> "BlockTrace":
        """A block whose states were not captured: every tensor of states has `steps` entries of no position."""
        canvas, values = torch.zeros(steps, 0, dtype=torch.int64), torch.zeros(steps, 0)
        return cls(canvas, torch.zeros(steps, 0, 0), canvas.bool(), values, values, tokens, block, start)

    @property
    def steps(self) -> int:
        return self.canvas.shape[0]


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One response with all of its states.

    prompt_ids   int64 [P]
    response_ids int64 [R]  up to and including the end token if there is one
    finish_reason "stop" or "length"
    """

    prompt_ids: Tensor
    response_ids: Tensor
    blocks: list[BlockTrace]
    finish_reason: str
    seed: int
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def forwards(self) -> int:
        """Denoiser forwards of the response."""
        return sum(block.steps for block in self.blocks)

    @property
    def tpf(self) -> float:
        """Tokens per forward, denoising steps only."""
        return len(self.response_ids) / max(1, self.forwards)

    @property
    def tpf_commit(self) -> float:
        """Tokens per forward with one cache commit a block counted as a forward."""
        return len(self.response_ids) / max(1, self.forwards + len(self.blocks))
