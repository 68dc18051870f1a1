"""The controls of an ORL run: ordinary block-diffusion training under the same schedule and budget.

"rsft" trains on fresh verified answers with random noise, "pretrain" on the task's own solutions.
"""

from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from tokenizers import Tokenizer
from torch import Tensor

from orl_core.trajectory import Trajectory
from orl_train.data.noisy_batch import NoiseSettings, NoisyBatch, TokenRange, collate, make_sample, sample_generator
from orl_train.orl.answers import problem_of, prompt_ids
from orl_train.orl.config import OrlConfig
from orl_train.pretrain import batch_loss, position_weights
from orl_train.replay import ReplaySums

Pair = tuple[Tensor, Tensor, int]


def verified_pairs(kept: Sequence[tuple[Trajectory, int]]) -> list[Pair]:
    """(prompt, answer, sample number) of verified trajectories."""
    return [(trajectory.prompt_ids, trajectory.response_ids, sample) for trajectory, sample in kept]


def solution_pairs(config: OrlConfig, tokenizer: Tokenizer, eos_id: int, update: int) -> list[Pair]:
    """(prompt, solution, sample number) of as many problems as an update answers."""
    count = config.rollout.prompts * config.rollout.rollouts
    pairs: list[Pair] = []
    for index in range(update * count, (update + 1) * count):
        problem = problem_of(config.seed, index)
        solution = torch.tensor([*tokenizer.encode(problem.solution).ids, eos_id])
        pairs.append((prompt_ids(tokenizer, problem), solution, index))
    return pairs


def noisy_batch(pairs: Sequence[Pair], model: Any, seed: int) -> NoisyBatch:
    """The pairs under the pretraining's noise, seeded by sample number."""
    config = model.config
    tokens = TokenRange(config.vocab_size, config.pad_token_id, config.mask_token_id)
    samples = [
        make_sample(
            prompt,
            answer,
            canvas_length=config.canvas_length,
            family=model.family,
            tokens=tokens,
            settings=NoiseSettings(),
            generator=sample_generator(seed, index, "control-noise"),
        )
        for prompt, answer, index in pairs
    ]
    return collate(samples, config.pad_token_id)


def control_gradients(accelerator: Accelerator, model: Any, pairs: Sequence[Pair], config: OrlConfig, update: int):
    """Adds the gradients of this rank's share of the pairs to the model's parameters; returns ReplaySums."""
    mine = pairs[accelerator.process_index :: accelerator.num_processes]
    share = torch.rand(1, generator=sample_generator(config.seed, update, "self-conditioning")).item()
    weight, loss = torch.zeros((), device=accelerator.device), torch.zeros((), device=accelerator.device)
    tokens = 0
    if mine:
        batch = noisy_batch(mine, model, config.seed)
        weight = position_weights(batch, model.family)[1].sum()
        loss = batch_loss(model, batch, model.family, with_residual=config.residual and share < 0.5)
        tokens = batch.ids.numel()
    total: Any = accelerator.reduce(weight.clone())
    if mine:
        accelerator.backward(loss / total)
    value: Any = accelerator.reduce(loss.detach()) / total
    return ReplaySums(total=float(value), prediction=float(value), uncertain=int(total), tokens=tokens)
