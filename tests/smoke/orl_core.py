"""What orl-core alone can do: statistics of logits, one decoder built, the arithmetic task and its verifier."""

from math import isclose, log

import torch

from orl_core.arithmetic import problems, verify
from orl_core.entropy import token_stats

stats = token_stats(torch.zeros(1, 4, 32))
assert isclose(float(stats.entropy.mean()), log(32), rel_tol=1e-6)
for problem in problems("test", 20, 0):
    assert verify(problem.prompt, problem.solution, problem.reference)
print("orl-core works")
