"""Shared fixtures: recorded reference runs, recorded draws, and a decoding loop."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from safetensors import safe_open

from orl_core.decoders import CanvasState
from orl_core.entropy import TokenStats
from orl_core.rng import Stream

# Derandomised: a decision within rounding of a threshold must not fail one run in a thousand.
settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("repeatable")

GOLDEN = Path(__file__).parent / "golden"


class RecordedDraws:
    """A DrawSource that returns what was recorded: `canvas` [B, C] once, `renoise` [S, B, C] by step."""

    def __init__(self, canvas: torch.Tensor, renoise: torch.Tensor) -> None:
        self.canvas, self.renoise = canvas, renoise

    def tokens(self, stream, block_B, step_B, length, vocab_size):
        if stream is Stream.CANVAS:
            return self.canvas
        rows = torch.arange(len(step_B))
        return self.renoise[step_B.clamp(max=len(self.renoise) - 1), rows]

    def uniform(self, stream, block_B, step_B, length, lanes):
        raise AssertionError("candidates are given to these tests, never drawn by the decoder")


class NoDraws:
    """A DrawSource for decoders that must not draw."""

    def tokens(self, *args):
        raise AssertionError("a masked decoder draws no tokens")

    def uniform(self, *args):
        raise AssertionError("a masked decoder draws no numbers")


def decode(decoder, stats_of_step, fixed_BC, editable_BC, draws) -> list[CanvasState]:
    """All states of one block, the initial one first; `stats_of_step(k, state)` gives the TokenStats of step k."""
    block_B = torch.zeros(len(fixed_BC), dtype=torch.int64)
    states = [decoder.init(fixed_BC, editable_BC, draws, block_B)]
    while not states[-1].done.all():
        assert len(states) <= decoder.max_steps, "the decoder did not stop within max_steps"
        states.append(decoder.step(stats_of_step(len(states) - 1, states[-1]), states[-1], draws, block_B))
    return states


@pytest.fixture
def load_golden():
    def load(name: str) -> tuple[dict[str, torch.Tensor], dict[str, dict]]:
        """Tensors and JSON metadata of tests/golden/<name>.safetensors."""
        with safe_open(GOLDEN / f"{name}.safetensors", "pt") as file:
            metadata = {k: json.loads(v) for k, v in (file.metadata() or {}).items()}
            return {key: file.get_tensor(key) for key in file.keys()}, metadata  # noqa: SIM118 - not a dict

    return load


@pytest.fixture(scope="session")
def recorded_draws():
    return RecordedDraws


@pytest.fixture(scope="session")
def no_draws():
    return NoDraws()


@pytest.fixture(scope="session")
def run_decoder():
    return decode


@pytest.fixture
def replay():
    def replay(decoder, golden, run: str) -> int:
        """Decodes every block of a recorded LLaDA2 run from its predictions, comparing each canvas.

        Returns the number of forwards.
        """
        record = {k.removeprefix(f"{run}/fwd_"): v for k, v in golden.items() if k.startswith(f"{run}/fwd_")}
        ends, forwards = record["window_end"].tolist(), 0
        for end in sorted(set(ends)):
            own = [i for i, e in enumerate(ends) if e == end]
            first = record["block_before"][own[0]].long()[None]
            block_B = torch.zeros(1, dtype=torch.int64)
            state = decoder.init(first, first == decoder.mask_id, NoDraws(), block_B)
            for i in own:
                assert not state.done.any(), "the decoder stopped before the reference did"
                assert torch.equal(state.canvas[0], record["block_before"][i].long())
                x0, p = record["x0"][i].long()[None], record["x0_p"][i][None]
                state = decoder.step(TokenStats(x0, x0, p, p, torch.zeros_like(p)), state, NoDraws(), block_B)
                assert torch.equal(decoder.result(state)[0], record["block_after"][i].long())
                forwards += 1
            assert state.done.all(), "the reference stopped before the decoder did"
        return forwards

    return replay
