"""The protocols by which the packages reach one another without importing one another."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from orl_core.decoders.base import Decoder
from orl_core.trajectory import Trajectory


@runtime_checkable
class Verifier(Protocol):
    """Decides whether a finished response answers its prompt. Pure: no state, no I/O that outlives the call."""

    def __call__(self, prompt: str, response: str, reference: Any) -> bool: ...


@runtime_checkable
class RolloutEngine(Protocol):
    """Generates responses and captures every state on the way."""

    def rollout(
        self,
        prompts: Sequence[Tensor],
        decoder: Decoder,
        *,
        max_new_tokens: int,
        seeds: Sequence[int],
        residual: bool = True,
        capture: bool = True,
    ) -> list[Trajectory]:
        """One trajectory per prompt (int64 [P] each), row i drawing its numbers from seeds[i].

        capture: False keeps no state; the blocks then hold their steps, tokens and start (BlockTrace.uncaptured).
        """
        ...


@runtime_checkable
class Denoiser(Protocol):
    """A trainable block-diffusion model as the losses see it: packed tokens in, logits out.

    ids and positions are int64 [B, T], mask is bool [B, T, T] (or whatever the implementation's attention takes),
    z is float [B, T, d] or None, receives is bool [B, T]: the positions that take the residual.
    """

    def denoise(
        self,
        ids: Tensor,
        positions: Tensor,
        mask: Any,
        z: Tensor | None = None,
        receives: Tensor | None = None,
    ) -> Tensor:
        """Logits float [B, T, V]."""
        ...
