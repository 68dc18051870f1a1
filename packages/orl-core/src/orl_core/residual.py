"""Residual context: each step hands its prediction on as an expected embedding (ORL; RCD, arXiv 2601.22954).

    z_i = sum_v p_i(v) E[v]            e_i = E[x_i] + alpha * g_phi(stop_gradient(z_i))

Shape legend: B batch, C canvas, V vocabulary, d width.
"""

import torch
from torch import Tensor, nn

from orl_core.errors import ConfigError, ShapeError


def expected_embedding(prob_BCV: Tensor, embedding_Vd: Tensor) -> Tensor:
    """z = p E, [B, C, d] in the dtype of `embedding_Vd`. `embedding_Vd` carries the model's own embedding scale."""
    if prob_BCV.shape[-1] != embedding_Vd.shape[0]:
        raise ShapeError(f"p has {prob_BCV.shape[-1]} tokens but the embedding has {embedding_Vd.shape[0]} rows")
    return prob_BCV.to(embedding_Vd.dtype) @ embedding_Vd


def expected_embedding_top_k(prob_BCV: Tensor, embedding_Vd: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """z from the k most probable tokens only, not renormalised.

    Returns (z [B, C, d], missed probability mass [B, C]); ||z - z_exact|| <= missed * max_v ||E_v||.
    """
    top_BCk, index_BCk = prob_BCV.topk(min(k, prob_BCV.shape[-1]), -1)
    z = (top_BCk.to(embedding_Vd.dtype)[..., None] * embedding_Vd[index_BCk]).sum(-2)
    return z, (1 - top_BCk.sum(-1)).clamp(min=0)


class ResidualAdapter(nn.Module):
    """g_phi: RMSNorm and a gated MLP whose output projection starts at zero, scaled by a learned alpha.

    Zero output projection: an untrained adapter leaves the base model's function unchanged. Weight names in a
    checkpoint: `residual_adapter.{norm.weight, gate_proj.weight, up_proj.weight, down_proj.weight, alpha}`.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, eps: float = 1e-6, alpha: float = 1.0) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden_size, eps=eps)
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.alpha = nn.Parameter(torch.tensor(float(alpha)))
        nn.init.zeros_(self.down_proj.weight)

    def forward(self, z: Tensor) -> Tensor:
        """alpha * g_phi(z) for z [..., d]; no gradient flows into z."""
        h = self.norm(z.detach())
        return self.alpha * self.down_proj(nn.functional.silu(self.gate_proj(h)) * self.up_proj(h))


def add_residual(embedding: Tensor, residual: Tensor, receives: Tensor) -> Tensor:
    """Adds the residual where `receives` (bool, [...]) is True; elsewhere the embedding is returned bit for bit.

    Uniform family: every canvas position receives it; masked family: the unresolved ones; first step of a block: none.
    """
    return torch.where(receives[..., None], embedding + residual.to(embedding.dtype), embedding)


def residual_receivers(family: str, unresolved_BC: Tensor, has_context_B: Tensor) -> Tensor:
    """Which positions of a canvas receive the residual, bool [B, C].

    family: "uniform" or "masked". has_context_B: bool [B], False at a block's first step, where nothing receives it.
    """
    if family not in ("uniform", "masked"):
        raise ConfigError(f"family is {family!r}; it must be 'uniform' or 'masked'")
    everywhere = torch.ones_like(unresolved_BC) if family == "uniform" else unresolved_BC
    return everywhere & has_context_B[:, None]
