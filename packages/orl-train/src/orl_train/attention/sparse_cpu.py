"""Block-sparse staircase attention in plain PyTorch: queries that see the same keys are batched, no other is touched.

Clean keys sorted by position are visible as a prefix, so a query sees a prefix of its segment's clean keys and, if it
is noisy, its own state. Queries are divided into sets of one segment, state and prefix; sets of equal sizes form one
unmasked batch. Token-causal contexts of equal length form one causal batch.
Shape legend: B batch, T tokens, H query heads, G key heads, D head width; n sets of Q queries and K keys.
"""

from collections import defaultdict
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from orl_core.visibility import PADDING_SEGMENT, Visibility


@dataclass(frozen=True, slots=True)
class SparsePlan:
    """Which tokens attend to which, over the B * T tokens of a batch.

    queries  int64 [B*T]  tokens in the order of the batches; None if that is their own order
    inverse  int64 [B*T]  where each token is found in that order; None likewise
    keys     int64 [sum of n * K]
    batches  (n, Q, K, causal) of each batch
    """

    queries: Tensor | None
    inverse: Tensor | None
    keys: Tensor
    batches: tuple[tuple[int, int, int, bool], ...]

    @property
    def scores(self) -> int:
        """Number of (query, key) scores computed per head; a causal batch counts its whole square."""
        return sum(n * q * k for n, q, k, _ in self.batches)


def sparse_plan(visibility: Visibility, batch: int) -> SparsePlan:
    """The plan for attributes [T] (shared by the rows of the batch) or [B, T]."""
    sets: dict[tuple[int, int, bool], list[tuple[Tensor, Tensor]]] = defaultdict(list)
    length = visibility.segment.shape[-1]
    for row in range(batch):
        attributes = (visibility.segment, visibility.position, visibility.state, visibility.limit)
        columns = [(x if x.dim() == 1 else x[row]).cpu() for x in attributes]
        for queries, keys, causal in _row_sets(*columns):
            sets[len(queries), len(keys), causal].append((queries + row * length, keys + row * length))
    queries = torch.cat([q for members in sets.values() for q, _ in members])
    keys = torch.cat([k for members in sets.values() for _, k in members])
    batches = tuple((len(members), q, k, causal) for (q, k, causal), members in sets.items())
    device = visibility.segment.device
    if torch.equal(queries, torch.arange(len(queries))):
        return SparsePlan(None, None, keys.to(device), batches)
    return SparsePlan(queries.to(device), queries.argsort().to(device), keys.to(device), batches)


def sparse_attention(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, plan: SparsePlan, scale: float) -> Tensor:
    """Equals `dense_attention` over the plan's visibility, in value and gradient; [B, H, T, D]."""
    batch, heads, length, width = q_BHTD.shape
    grouped = heads != k_BGTD.shape[1]
    # One gather for all batches: a gather each would add up whole-size gradients in the backward pass.
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q_BHTD, k_BGTD, v_BGTD))
    q = q if plan.queries is None else q.index_select(0, plan.queries)
    k, v = k.index_select(0, plan.keys), v.index_select(0, plan.keys)
    # Likewise split, not slices: each slice would add a whole-size gradient.
    q_sizes, k_sizes = [n * queries for n, queries, _, _ in plan.batches], [n * keys for n, _, keys, _ in plan.batches]
    outputs = []
    for (n, _, _, causal), *parts in zip(
        plan.batches, q.split(q_sizes), k.split(k_sizes), v.split(k_sizes), strict=True
    ):
        q_nHQD, k_nGKD, v_nGKD = (x.unflatten(0, (n, -1)).transpose(1, 2) for x in parts)
        out = F.scaled_dot_product_attention(q_nHQD, k_nGKD, v_nGKD, is_causal=causal, scale=scale, enable_gqa=grouped)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    out = torch.cat(outputs)
    out = out if plan.inverse is None else out.index_select(0, plan.inverse)
    return out.view(batch, length, heads, width).transpose(1, 2)


def _row_sets(segment: Tensor, position: Tensor, state: Tensor, limit: Tensor):
    """(queries, keys, causal) of each set of one sequence."""
    for number in segment.unique().tolist():
        members = (segment == number).nonzero().squeeze(-1)
        if number == PADDING_SEGMENT:
            for token in members.split(1):
                yield token, token, False
            continue
        clean = members[state[members] == 0]
        clean = clean[position[clean].argsort(stable=True)]
        clean_position = position[clean].contiguous()
        for own in state[members].unique().tolist():
            queries = members[state[members] == own] if own else clean
            prefix = torch.searchsorted(clean_position, limit[queries])
            if not own and torch.equal(prefix, torch.arange(1, len(clean) + 1)):
                yield queries, clean, True
                continue
            for count in prefix.unique().tolist():
                keys = torch.cat([clean[:count], queries]) if own else clean[:count]
                yield queries[prefix == count], keys, False
