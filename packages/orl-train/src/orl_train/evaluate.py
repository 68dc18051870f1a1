"""Accuracy and tokens per forward of a model in training, by batched rollouts."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import log

import torch
from tokenizers import Tokenizer

from orl_core.arithmetic import Problem, verify, verify_final, wording_keys
from orl_core.decoders import Decoder
from orl_core.protocols import RolloutEngine


@dataclass(frozen=True, slots=True)
class Evaluation:
    """accuracy: whole derivation verified; final_accuracy: last number right. tpf, tpf_commit: all tokens / all
    forwards (tpf_commit counts one commit a block). diversity: entropy (nats) of the wordings chosen in the step lines
    of verified answers. n: problems."""

    accuracy: float
    final_accuracy: float
    tpf: float
    tpf_commit: float
    diversity: float
    n: int


def evaluate(
    rollout: RolloutEngine,
    tokenizer: Tokenizer,
    decoder: Decoder,
    problems: Sequence[Problem],
    *,
    max_new_tokens: int,
    residual: bool = True,
    batch: int = 64,
) -> Evaluation:
    """Answers every problem once; row i draws from seed i."""
    right = final = tokens = forwards = blocks = 0
    wordings: Counter[int] = Counter()
    for first in range(0, len(problems), batch):
        part = problems[first : first + batch]
        answers = rollout.rollout(
            [torch.tensor(tokenizer.encode(p.prompt + "\n").ids) for p in part],
            decoder,
            max_new_tokens=max_new_tokens,
            seeds=range(first, first + len(part)),
            residual=residual,
            capture=False,
        )
        for problem, answer in zip(part, answers, strict=True):
            text = tokenizer.decode(answer.response_ids.tolist())
            right += verify(problem.prompt, text, problem.reference)
            final += verify_final(problem.prompt, text, problem.reference)
            tokens += len(answer.response_ids)
            forwards += answer.forwards
            blocks += len(answer.blocks)
            keys = wording_keys(text, problem.reference)
            if keys is not None and len(keys) > 2:
                wordings.update(keys[1:-1])
    n = len(problems)
    return Evaluation(
        accuracy=right / n,
        final_accuracy=final / n,
        tpf=tokens / forwards,
        tpf_commit=tokens / (forwards + blocks),
        diversity=_entropy(wordings),
        n=n,
    )


def _entropy(counts: Counter[int]) -> float:
    total = sum(counts.values())
    return -sum(c / total * log(c / total) for c in counts.values()) if total else 0.0
