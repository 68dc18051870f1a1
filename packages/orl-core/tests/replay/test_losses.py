import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orl_core.errors import ConfigError, ShapeError
from orl_core.losses import (
    OrlLossConfig,
    ReplayTargets,
    adjacent_entropy_contraction,
    capped_reverse_kl,
    orl_losses,
)
from orl_core.packing import empty_pack, pack, split_units
from orl_core.selection import select_states

VOCAB, WIDTH = 11, 8


def random_case(seed, states=4, canvas=3, pairs=((0, 1), (2, 3))):
    """Logits, reference logits and targets of two responses of two states each, float64."""
    g = torch.Generator().manual_seed(seed)
    rows = states * canvas
    scale = torch.rand(rows, 1, generator=g, dtype=torch.float64) * 6
    logits = torch.randn(rows, VOCAB, generator=g, dtype=torch.float64) * scale
    reference = logits + torch.randn(rows, VOCAB, generator=g, dtype=torch.float64)
    targets = ReplayTargets(
        target=torch.randint(VOCAB, (rows,), generator=g),
        unresolved=torch.rand(rows, generator=g) < 0.6,
        rollout_entropy=torch.rand(rows, generator=g) * 2,
        state=torch.arange(states).repeat_interleave(canvas),
        state_weight=torch.full((states,), 0.5),
        pair=torch.tensor(pairs).reshape(-1, 2),
        pair_weight=torch.ones(len(pairs)),
    )
    return logits, reference, targets


def softmax(row):
    top = max(row)
    exps = [math.exp(x - top) for x in row]
    return [e / sum(exps) for e in exps]


def plain_entropy(p):
    return -sum(x * math.log(x) for x in p if x > 0)


def mean_or_zero(values):
    return sum(values) / len(values) if values else 0.0


def plain_losses(logits, reference, targets, config, responses):
    """The losses in loops over Python floats, straight from the definitions."""
    p = [softmax(row) for row in logits.tolist()]
    q = [softmax(row) for row in reference.tolist()]
    rows_of = [
        [i for i, s in enumerate(targets.state.tolist()) if s == state] for state in range(len(targets.state_weight))
    ]
    full = math.log(VOCAB)
    prediction = kl = aec = 0.0
    for state, rows in enumerate(rows_of):
        weight = float(targets.state_weight[state]) / responses
        uncertain = [
            -math.log(p[i][targets.target[i]])
            for i in rows
            if targets.unresolved[i] and float(targets.rollout_entropy[i]) >= config.gate_entropy * full
        ]
        anchored = [
            min(sum(a * math.log(a / b) for a, b in zip(p[i], q[i], strict=True)), config.kl_cap)
            for i in rows
            if plain_entropy(q[i]) <= config.reference_gate * full
            and (config.kl_positions == "canvas" or targets.unresolved[i])
        ]
        prediction += weight * mean_or_zero(uncertain)
        kl += weight * mean_or_zero(anchored)
    for (source, following), weight in zip(targets.pair.tolist(), targets.pair_weight.tolist(), strict=True):
        entropies = [
            [plain_entropy(p[i]) / full for i in rows_of[state] if targets.unresolved[i]]
            for state in (source, following)
        ]
        if all(entropies):
            h_source, h_next = map(mean_or_zero, entropies)
            aec += weight / responses * max(0.0, h_next - (1 - config.rho) * h_source) ** 2
    return prediction, kl, aec


@given(
    seed=st.integers(0, 10_000),
    gate=st.floats(0, 1),
    reference_gate=st.floats(0, 1),
    cap=st.floats(0, 2),
    rho=st.floats(0, 1),
    where=st.sampled_from(["canvas", "unresolved"]),
)
def test_every_term_equals_plain_loops(seed, gate, reference_gate, cap, rho, where):
    config = OrlLossConfig(
        gate_entropy=gate, reference_gate=reference_gate, kl_cap=cap, rho=rho, kl_positions=where, aec_weight=3.0
    )
    logits, reference, targets = random_case(seed)
    losses = orl_losses(logits, targets, config, responses=2, reference_logits_NV=reference)
    prediction, kl, aec = plain_losses(logits, reference, targets, config, 2)
    assert losses.prediction.item() == pytest.approx(prediction, abs=1e-12)
    assert losses.kl.item() == pytest.approx(kl, abs=1e-12)
    assert losses.aec.item() == pytest.approx(aec, abs=1e-12)
    assert losses.total.item() == pytest.approx(prediction + 0.2 * kl + 3.0 * aec, abs=1e-12)


@pytest.mark.parametrize(
    ("source", "following", "expected"), [(0.40, 0.36, 0.0036), (0.40, 0.30, 0.0), (0.40, 0.1, 0.0), (0.0, 0.0, 0.0)]
)
def test_the_worked_example_of_contraction(source, following, expected):
    h = torch.tensor(following, dtype=torch.float64, requires_grad=True)
    loss = adjacent_entropy_contraction(h, torch.tensor(source, dtype=torch.float64), 0.25)
    loss.backward()
    assert loss.item() == pytest.approx(expected, abs=1e-15)
    assert h.grad is not None
    assert h.grad.item() == pytest.approx(2 * math.sqrt(expected), abs=1e-15)


def aec_only(**kwargs):
    return OrlLossConfig(kl_weight=0, gate_entropy=1.0, aec_weight=1.0, **kwargs)


def test_the_source_of_a_pair_gets_no_gradient():
    logits, _, targets = random_case(0, states=2, pairs=((0, 1),))
    targets.unresolved[:] = True
    targets.rollout_entropy[:] = 0
    logits = (logits * torch.tensor([1.0] * 3 + [0.1] * 3)[:, None]).requires_grad_()
    orl_losses(logits, targets, aec_only(), responses=1).aec.backward()
    assert logits.grad is not None
    assert logits.grad[:3].abs().max() == 0
    assert logits.grad[3:].abs().max() > 0


def test_a_met_target_gives_zero_loss_and_zero_gradient():
    logits, _, targets = random_case(0, states=2, pairs=((0, 1),))
    targets.unresolved[:] = True
    targets.rollout_entropy[:] = 0
    logits = (logits * torch.tensor([0.1] * 3 + [1.0] * 3)[:, None]).requires_grad_()
    losses = orl_losses(logits, targets, aec_only(), responses=1)
    losses.total.backward()
    assert losses.total.item() == 0
    assert logits.grad is not None
    assert logits.grad.abs().max() == 0


@pytest.mark.parametrize("resolved", [(0,), (1,), (0, 1)])
def test_contraction_needs_unresolved_positions_in_both_states(resolved):
    logits, _, targets = random_case(3, states=2, pairs=((0, 1),))
    for state in (0, 1):
        targets.unresolved[targets.state == state] = state not in resolved
    logits = (logits * 0.1).requires_grad_()
    losses = orl_losses(logits, targets, aec_only(rho=1.0), responses=1)
    losses.aec.backward()
    assert losses.aec.item() == 0
    assert logits.grad is not None
    assert logits.grad.abs().max() == 0


def test_nothing_to_learn_gives_exact_zeros_even_with_suppressed_tokens():
    logits, reference, targets = random_case(5)
    logits[:, 4] = reference[:, 4] = -torch.inf
    targets.unresolved[:] = False
    logits.requires_grad_()
    config = OrlLossConfig(kl_positions="unresolved")
    losses = orl_losses(logits, targets, config, responses=3, reference_logits_NV=reference)
    losses.total.backward()
    assert losses.total.item() == 0
    assert logits.grad is not None
    assert logits.grad.abs().max() == 0
    assert (losses.uncertain, losses.anchored) == (0, 0)


def test_suppressed_tokens_never_make_a_nan():
    logits, reference, targets = random_case(6)
    logits[:, 4] = -torch.inf
    reference[::2, 7] = -torch.inf
    targets.target[:] = 1
    logits.requires_grad_()
    config = OrlLossConfig(reference_gate=1.0)
    losses = orl_losses(logits, targets, config, responses=2, reference_logits_NV=reference)
    losses.total.backward()
    assert losses.total.isfinite()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_reverse_kl_is_capped_position_by_position():
    log_p = torch.log_softmax(torch.tensor([[0.0, 0.1, 0.0], [9.0, 0.0, 0.0]], dtype=torch.float64), -1)
    log_q = torch.log_softmax(torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 9.0]], dtype=torch.float64), -1)
    log_p.requires_grad_()
    kl = capped_reverse_kl(log_p, log_q, 1.0)
    kl.sum().backward()
    uncapped = (log_p.exp() * (log_p - log_q)).sum(-1)
    assert kl[0].item() == pytest.approx(uncapped[0].item())
    assert uncapped[1] > 1
    assert kl[1].item() == 1.0
    assert log_p.grad is not None
    assert log_p.grad[0].abs().max() > 0
    assert log_p.grad[1].abs().max() == 0


class TinyDenoiser(torch.nn.Module):
    """One attention layer in float64 over the dense mask: enough to let tokens see one another."""

    def __init__(self) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(0)

        def weight(*shape):
            return torch.nn.Parameter(torch.randn(*shape, generator=g, dtype=torch.float64))

        self.embedding, self.place = weight(VOCAB, WIDTH), weight(32, WIDTH)
        self.q, self.k, self.v, self.alpha = weight(WIDTH, WIDTH), weight(WIDTH, WIDTH), weight(WIDTH, WIDTH), weight(1)

    def forward(self, packed):
        h = self.embedding[packed.ids] + self.place[packed.visibility.position]
        h = h + self.alpha * packed.z * packed.receives[:, None]
        score = (h @ self.q) @ (h @ self.k).T / WIDTH**0.5
        score = score.masked_fill(~packed.visibility.dense_mask(), -torch.inf)
        return (h + score.softmax(-1) @ (h @ self.v)) @ self.embedding.T


CONFIG = OrlLossConfig(gate_entropy=0.1, reference_gate=0.8, aec_weight=10.0)


def loss_and_gradient(micro_batches, responses, family):
    """Sum over the micro-batches of the loss, and the gradient of every parameter."""
    model, total = TinyDenoiser(), 0.0
    for packed in micro_batches:
        logits = model(packed)[packed.rows]
        reference = (logits.detach() + torch.sin(7 * logits.detach())) * 1.5
        losses = orl_losses(logits, packed.targets, CONFIG, responses=responses, reference_logits_NV=reference)
        losses.total.backward()
        total += losses.total.item()
    return total, torch.cat([p.grad.flatten() for p in model.parameters()])


@settings(max_examples=25, deadline=None)
@given(data=st.data(), seed=st.integers(0, 1000), family=st.sampled_from(["uniform", "masked"]))
def test_loss_and_gradient_do_not_depend_on_packing_padding_order_or_division(make_trajectory, data, seed, family):
    trajectories = [make_trajectory(seed + i, 2 + i, 3, [2, 3, 1], vocab=VOCAB, width=WIDTH) for i in range(4)]
    runs = [select_states(t, 5, seed=seed, sample=i) for i, t in enumerate(trajectories)]
    whole = [unit for t, r in zip(trajectories, runs, strict=True) for unit in split_units(t, r, 100)]
    assert len(whole) == 4
    expected, expected_gradient = loss_and_gradient([pack([unit], family) for unit in whole], 4, family)

    tight = max(split_units(t, [run], 100)[0].tokens for t, r in zip(trajectories, runs, strict=True) for run in r)
    budget = data.draw(st.integers(tight, 40), label="token budget")
    units = [unit for t, r in zip(trajectories, runs, strict=True) for unit in split_units(t, r, budget)]
    units = data.draw(st.permutations(units), label="order")
    cuts = data.draw(st.lists(st.integers(0, len(units)), max_size=3), label="micro-batch borders")
    edges = [0, *sorted(cuts), len(units)]
    parts = [units[a:b] for a, b in itertools.pairwise(edges)]
    padding = data.draw(st.integers(0, 5), label="padding")
    packs = [pack(p, family) if p else empty_pack(WIDTH, dtype=torch.float64) for p in parts]
    packs = [p.padded(len(p.ids) + padding, pad_id=3) for p in packs]
    total, gradient = loss_and_gradient(packs, 4, family)
    assert total == pytest.approx(expected, rel=1e-6)  # the weights of states are float32
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-6, atol=1e-9)


def test_perturbing_one_response_leaves_every_other_logit_unchanged(make_trajectory):
    trajectories = [make_trajectory(i, 3, 3, [2, 3], vocab=VOCAB, width=WIDTH) for i in range(3)]
    units = [split_units(t, select_states(t, 4, seed=0, sample=i), 100)[0] for i, t in enumerate(trajectories)]
    packed = pack(units, "uniform").padded(80)
    before = TinyDenoiser()(packed)
    other = packed.visibility.segment == 1
    packed.ids[other] = (packed.ids[other] + 1) % VOCAB
    packed.z[other] += 1
    after = TinyDenoiser()(packed)
    assert torch.equal(before[~other], after[~other])
    assert (before[other] != after[other]).any(-1).all()


def test_a_state_sees_no_answer_no_later_block_and_no_other_state(make_trajectory):
    trajectory = make_trajectory(0, 3, 3, [2, 2], vocab=VOCAB, width=WIDTH)
    packed = pack(split_units(trajectory, select_states(trajectory, 4, seed=0, sample=0), 100), "uniform")
    model, first = TinyDenoiser(), packed.visibility.state == 1
    before = model(packed)[first]
    hidden = ~first & ((packed.visibility.state > 0) | (packed.visibility.position >= 3))
    packed.ids[hidden] = (packed.ids[hidden] + 1) % VOCAB
    packed.z[hidden] += 1
    assert hidden.sum() == 3 * 3 + 3
    assert torch.equal(model(packed)[first], before)


def test_bfloat16_logits_are_reduced_in_float32():
    logits, reference, targets = random_case(1)
    losses = orl_losses(logits.bfloat16(), targets, CONFIG, responses=1, reference_logits_NV=reference.bfloat16())
    assert losses.total.dtype == torch.float32


def test_wrong_rows_a_missing_reference_and_bad_settings_are_refused():
    logits, reference, targets = random_case(0)
    with pytest.raises(ShapeError, match=r"need \[12, V\]"):
        orl_losses(logits[1:], targets, CONFIG, responses=1, reference_logits_NV=reference[1:])
    with pytest.raises(ShapeError, match="reference logits"):
        orl_losses(logits, targets, CONFIG, responses=1, reference_logits_NV=reference[:, 1:])
    with pytest.raises(ConfigError, match="reference_logits_NV"):
        orl_losses(logits, targets, CONFIG, responses=1)
    with pytest.raises(ConfigError, match="responses"):
        orl_losses(logits, targets, CONFIG, responses=0, reference_logits_NV=reference)
    with pytest.raises(ConfigError, match="rho"):
        OrlLossConfig(rho=1.5)
    with pytest.raises(ConfigError, match="aec_weight"):
        OrlLossConfig(aec_weight=-1)
    with pytest.raises(ConfigError, match="kl_positions"):
        OrlLossConfig(kl_positions="everywhere")  # pyright: ignore[reportArgumentType]
