"""Optimizers and schedule: Muon (torch.optim.Muon) on the matrices of the layers, AdamW on everything else.

The residual pathway (adapter and alpha) has its own learning-rate factor: unscaled updates of it are known to collapse
a run.
"""

from dataclasses import dataclass

import torch
from torch import nn

from orl_core.errors import ConfigError

RESIDUAL_PREFIX = "residual_adapter."
RESIDUAL_PREFIXES = (RESIDUAL_PREFIX, "model.decoder.self_conditioning.")  # the latter: DiffusionGemma's own
_NO_MATRIX = ("embed", "lm_head", "lora_")


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """muon_lr, adam_lr: peak rates; residual_factor multiplies both for the residual pathway.

    Linear warm-up over `warmup` updates, constant, linear decay to zero over the last `decay_share` of the run.
    """

    muon_lr: float = 0.02
    adam_lr: float = 3e-3
    residual_factor: float = 1.0
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    warmup: int = 50
    decay_share: float = 0.4

    def __post_init__(self) -> None:
        for name in ("muon_lr", "adam_lr", "residual_factor", "clip_norm"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be greater than 0")
        if not 0 <= self.decay_share <= 1:
            raise ConfigError(f"decay_share is {self.decay_share}; it must lie in [0, 1]")


def build_optimizers(model: nn.Module, config: OptimizerConfig) -> list[torch.optim.Optimizer]:
    """[Muon, AdamW], each with the residual pathway as a parameter group of its own; frozen parameters are left out.

    LoRA's factors go to AdamW: Muon's orthogonal updates are meant for whole matrices. One without parameters is left
    out.
    """
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        matrix = parameter.dim() == 2 and not any(part in name for part in _NO_MATRIX)
        groups.setdefault((matrix, name.startswith(RESIDUAL_PREFIXES)), []).append(parameter)

    def group_list(matrix: bool, lr: float) -> list[dict[str, object]]:
        return [
            {"params": params, "lr": lr * (config.residual_factor if residual else 1.0)}
            for (is_matrix, residual), params in groups.items()
            if is_matrix == matrix
        ]

    decay = config.weight_decay
    optimizers: list[torch.optim.Optimizer] = []
    if matrices := group_list(True, config.muon_lr):
        optimizers.append(torch.optim.Muon(matrices, lr=config.muon_lr, weight_decay=decay, adjust_lr_fn="original"))
    if others := group_list(False, config.adam_lr):
        optimizers.append(torch.optim.AdamW(others, lr=config.adam_lr, weight_decay=decay, betas=(0.9, 0.95)))
    return optimizers


def schedule_factor(step: int, total: int, config: OptimizerConfig) -> float:
    """Factor on the peak learning rate at update `step` (0-based) of `total`."""
    warm = min(1.0, (step + 1) / max(1, config.warmup))
    decay_steps = max(1, round(config.decay_share * total))
    return warm * min(1.0, max(0.0, (total - step) / decay_steps))
