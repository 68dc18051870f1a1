"""Routed experts: many small gated MLPs of which each token uses a few.

Tokens are sorted by expert on the device and multiplied group by group, so that shapes never depend on data and no
value travels to the host. Shape legend: N tokens, E experts, K experts per token, d width, m expert width.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from dlmrt.models.layers import Activation, gated_mlp_shapes


class Experts:
    """y = sum_k w_k down_k(act(gate_k(x)) * up_k(x)) over the K experts that a token chose."""

    def __init__(self, gate_up: Sequence[Tensor], down: Sequence[Tensor], *, act: Activation = F.silu) -> None:
        """gate_up: one [E, 2m, d] tensor, or per expert its gate [m, d] and up [m, d] in turn; down: one [E, d, m]
        tensor, or E of [d, m]. Separate tensors are gathered at each call: see `from_checkpoint`."""
        self.gate_up, self.down, self.act = list(gate_up), list(down), act

    @classmethod
    def from_checkpoint(cls, tensors: Mapping[str, Tensor], prefix: str, count: int, *, fuse: bool) -> "Experts":
        """Experts stored as `{prefix}{i}.{gate,up,down}_proj.weight`.

        fuse: copies them into one tensor once; otherwise they stay shared with the caller and each call gathers them.
        """
        gate_up = [tensors[f"{prefix}{i}.{name}_proj.weight"] for i in range(count) for name in ("gate", "up")]
        experts = cls(gate_up, [tensors[f"{prefix}{i}.down_proj.weight"] for i in range(count)])
        if fuse:
            gate_up, down = experts._weights()
            experts.gate_up, experts.down = [gate_up], [down]
        return experts

    def _weights(self) -> tuple[Tensor, Tensor]:
        if len(self.gate_up) == 1:
            return self.gate_up[0], self.down[0]
        return torch.cat(self.gate_up).unflatten(0, (len(self.down), -1)), torch.stack(self.down)

    def __call__(self, x_Nd: Tensor, index_NK: Tensor, weight_NK: Tensor) -> Tensor:
        """float [N, d] in the dtype of x; the sum over K runs in the dtype of `weight_NK`."""
        gate_up_Emd, down_Edm = self._weights()
        chosen = index_NK.flatten()
        order = chosen.argsort(stable=True)
        experts = torch.arange(gate_up_Emd.shape[0], device=chosen.device)
        ends = torch.searchsorted(chosen[order], experts, right=True, out_int32=True)
        hidden = F.grouped_mm(x_Nd[order // index_NK.shape[-1]], gate_up_Emd.mT, offs=ends)
        gate, up = hidden.chunk(2, -1)
        y = F.grouped_mm(self.act(gate) * up, down_Edm.mT, offs=ends)
        y_NKd = y[order.argsort()].unflatten(0, index_NK.shape)
        return (y_NKd.to(weight_NK.dtype) * weight_NK[..., None]).sum(-2).to(x_Nd.dtype)


def expert_shapes(prefix: str, count: int, d: int, m: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of experts stored one by one."""
    return {f"{prefix}{i}.{name}": shape for i in range(count) for name, shape in gated_mlp_shapes("", d, m).items()}
