import math

import pytest
import torch

from orl_core.visibility import is_visible
from orl_train.attention import staircase_attention


@pytest.mark.parametrize("name", ["packed", "staircase", "block causal"])
def test_the_reference_is_softmax_over_visible_keys_in_plain_loops(visibilities, name):
    seen = visibilities[name]
    length = len(seen.segment)
    segment, position, state, limit = (getattr(seen, a).tolist() for a in ("segment", "position", "state", "limit"))
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, length, 3, generator=g, dtype=torch.float64) for h in (2, 1, 1))
    out = staircase_attention(q, k, v, seen, scale=0.7, backend="reference")
    for head in range(2):
        for i in range(length):
            keys = [
                j
                for j in range(length)
                if is_visible(segment[i], state[i], limit[i], segment[j], position[j], state[j])
                or (segment[i] == -1 and i == j)
            ]
            weights = [math.exp(0.7 * float(q[0, head, i] @ k[0, 0, j])) for j in keys]
            expected = sum(w * v[0, 0, j] for w, j in zip(weights, keys, strict=True)) / sum(weights)
            torch.testing.assert_close(out[0, head, i], expected)
