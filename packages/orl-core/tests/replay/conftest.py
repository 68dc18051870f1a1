"""Builder of the tiny trajectories from which states are selected, packed and trained on."""

import pytest
import torch

from orl_core.trajectory import BlockTrace, Trajectory


@pytest.fixture(scope="session")
def make_trajectory():
    """make(seed, prompt, canvas, steps per block): a trajectory as a rollout would capture it, z in float64."""

    def make(seed: int, prompt: int, canvas: int, steps: list[int], *, vocab: int = 11, width: int = 8) -> Trajectory:
        g = torch.Generator().manual_seed(seed)
        blocks = []
        for index, count in enumerate(steps):
            z = torch.randn(count, canvas, width, generator=g, dtype=torch.float64)
            z[:1] = 0
            blocks.append(
                BlockTrace(
                    canvas=torch.randint(vocab, (count, canvas), generator=g),
                    z=z,
                    unresolved=torch.rand(count, canvas, generator=g) < 0.6,
                    entropy=torch.rand(count, canvas, generator=g) * 2,
                    top_prob=torch.rand(count, canvas, generator=g),
                    tokens=torch.randint(vocab, (canvas,), generator=g),
                    block=index,
                    start=prompt + index * canvas,
                )
            )
        prompt_ids = torch.randint(vocab, (prompt,), generator=g)
        response = torch.cat([block.tokens for block in blocks])[: len(steps) * canvas - 1]
        return Trajectory(prompt_ids, response, blocks, "stop", seed)

    return make
