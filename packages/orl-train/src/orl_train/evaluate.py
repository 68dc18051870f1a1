"""Accuracy and tokens per forward of a model in training, by batched rollouts."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import log

import torch
from tokenizers import Tokenizer

from orl_core.arithmetic import Problem, verify, verify_final, wording_keys
from orl_core.decoders import Decoder
from orl_core.protocols import RolloutEngine, Verifier


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


@dataclass(frozen=True, slots=True)
class Graded:
    """One answer: whether its whole derivation and its last number are right, its tokens up to and including the end,
    denoising forwards, blocks, and the wordings of its step lines (empty if not verified)."""

    right: bool
    final: bool
    tokens: int
    forwards: int
    blocks: int
    wordings: tuple[int, ...]


def grade(
    rollout: RolloutEngine,
    tokenizer: Tokenizer,
    decoder: Decoder,
    problems: Sequence[Problem],
    *,
    max_new_tokens: int,
    residual: bool = True,
    batch: int = 64,
    verifier: Verifier = verify,
) -> list[Graded]:
    """Answers every problem once; row i draws from seed i."""
    graded: list[Graded] = []
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
            graded.append(
                Graded(
                    right=bool(verifier(problem.prompt, text, problem.reference)),
                    final=verify_final(problem.prompt, text, problem.reference),
                    tokens=len(answer.response_ids),
                    forwards=answer.forwards,
                    blocks=len(answer.blocks),
                    wordings=(wording_keys(text, problem.reference) or ())[1:-1],
                )
            )
    return graded


def summarize(graded: Sequence[Graded]) -> Evaluation:
    """The measures of a set of answers."""
    n = len(graded)
    tokens, forwards = sum(g.tokens for g in graded), sum(g.forwards for g in graded)
    wordings: Counter[int] = Counter()
    for answer in graded:
        wordings.update(answer.wordings)
    return Evaluation(
        accuracy=sum(g.right for g in graded) / n,
        final_accuracy=sum(g.final for g in graded) / n,
        tpf=tokens / forwards,
        tpf_commit=tokens / (forwards + sum(g.blocks for g in graded)),
        diversity=_entropy(wordings),
        n=n,
    )


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
    return summarize(
        grade(rollout, tokenizer, decoder, problems, max_new_tokens=max_new_tokens, residual=residual, batch=batch)
    )


def _entropy(counts: Counter[int]) -> float:
    total = sum(counts.values())
    return -sum(c / total * log(c / total) for c in counts.values()) if total else 0.0
