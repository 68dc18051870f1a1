"""Noisy samples: functions of seed and index, and what the loss may and may not depend on."""

import dataclasses

import pytest
import torch
from accelerate import Accelerator

from orl_core.visibility import is_visible
from orl_train.data.noisy_batch import (
    NoiseSettings,
    TokenRange,
    collate,
    make_sample,
    noise_probability,
    sample_generator,
)
from orl_train.pretrain import ArithmeticBatches, accumulate, batch_loss, build_model, position_weights

FAMILIES = ["uniform", "masked"]


def tiny_sample(family, index=0, answer=20, canvas=8):
    return make_sample(
        torch.arange(5, 10),
        torch.arange(10, 10 + answer),
        canvas_length=canvas,
        family=family,
        tokens=TokenRange(vocab_size=60, pad_id=0, mask_id=2 if family == "masked" else None),
        settings=NoiseSettings(),
        generator=sample_generator(0, index, "noise"),
    )


@pytest.fixture
def batches(tiny_run, tokenizer):
    def build(family="uniform", **overrides):
        config = tiny_run(model_state_family=family, **overrides)
        torch.manual_seed(0)
        model = build_model(config, tokenizer)
        with torch.no_grad():
            model.residual_adapter.down_proj.weight.normal_(std=0.1)
        return config, model, ArithmeticBatches(config, tokenizer, model.config.vocab_size)

    return build


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sample_does_not_depend_on_the_others(batches, family):
    _, _, source = batches(family)
    forward = [source.sample(index) for index in range(6)]
    for index in reversed(range(6)):
        again = source.sample(index)
        for name in ("clean", "target", "noisy", "corrupted"):
            assert torch.equal(getattr(again, name), getattr(forward[index], name))
    assert not torch.equal(forward[0].noisy, forward[1].noisy)


def test_samples_of_a_batch_are_shared_out_over_ranks_and_micro_batches(batches):
    def rows(source, world):
        micro = [batch for rank in range(world) for batch in source.micro_batches(3, rank, world)]
        return sorted(tuple(b.ids[row][b.noisy[row]].tolist()) for b in micro for row in range(len(b.ids)))

    _, _, whole = batches(batch_size=6, micro_batch_size=6)
    _, _, parts = batches(batch_size=6, micro_batch_size=2)
    expected = rows(whole, 1)
    assert len(expected) == 6
    assert rows(parts, 1) == expected
    assert rows(parts, 2) == expected
    assert rows(parts, 4) == expected


def test_the_answer_is_padded_to_whole_blocks_and_all_but_the_last_are_context():
    sample = tiny_sample("uniform")
    assert sample.target.tolist() == [*range(10, 30), 0, 0, 0, 0]
    assert sample.clean.tolist() == [*range(5, 10), *range(10, 26)]
    assert sample.visibility.position.tolist() == [*range(21), *range(5, 29)]


@pytest.mark.parametrize("family", FAMILIES)
def test_only_corrupted_positions_differ_from_the_target(family):
    for index in range(30):
        sample = tiny_sample(family, index)
        assert torch.equal(sample.noisy[~sample.corrupted], sample.target[~sample.corrupted])
        if family == "masked":
            assert torch.equal(sample.noisy == 2, sample.corrupted)


def test_shares_of_pure_noise_and_of_suffixes():
    generator = torch.Generator().manual_seed(0)
    rows = noise_probability(4000, 16, NoiseSettings(pure_share=0.1, suffix_share=0.4), generator)
    suffix = (rows[:, :1] != rows[:, -1:])[:, 0]
    assert (rows == 1).all(-1).float().mean().item() == pytest.approx(0.1, abs=0.02)
    assert suffix.float().mean().item() == pytest.approx(0.4 * 15 / 16, abs=0.03)
    assert ((rows >= 0.05) | (rows == 0)).all()
    assert (rows[suffix][:, -1] >= 0.5).all()


def test_visibility_of_a_batch_equals_a_plain_loop():
    samples = [tiny_sample("uniform", 0), tiny_sample("uniform", 1, answer=3)]
    batch = collate(samples, pad_id=0)
    for row, sample in enumerate(samples):
        clean, total = len(sample.clean), len(sample.clean) + len(sample.noisy)
        for query in range(batch.ids.shape[1]):
            for key in range(batch.ids.shape[1]):
                if query >= total or key >= total:
                    expected = query == key
                elif query < clean:
                    expected = key <= query
                else:
                    block = (query - clean) // 8
                    start = 5 + 8 * block
                    expected = key < start if key < clean else (key - clean) // 8 == block
                assert batch.mask[row, query, key].item() is expected, (row, query, key)
    view = samples[0].visibility
    assert bool(is_visible(*(int(t[30]) for t in (view.segment, view.state, view.limit)), 0, 4, 0))


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_does_not_enter_the_loss(batches, family):
    _, model, source = batches(family)
    samples = sorted((source.sample(index) for index in range(3)), key=lambda s: len(s.clean) + len(s.noisy))
    close, wide = collate(samples, 0), collate(samples, 0, multiple=128)
    assert wide.ids.shape[1] > close.ids.shape[1]
    padding = ~wide.noisy & (wide.positions == 0)
    padding[:, 0] = False
    other = dataclasses.replace(
        wide,
        ids=torch.where(padding, 7, wide.ids),
        target=torch.where(padding, 11, wide.target),
    )
    losses = [batch_loss(model, batch, family, with_residual=True) for batch in (close, wide, other)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(losses[2], losses[0], rtol=1e-5, atol=1e-5)
    weights = [position_weights(batch, family)[1].sum() for batch in (close, wide, other)]
    assert weights[0] == weights[1] == weights[2] > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_does_not_depend_on_the_micro_batch_split(batches, family, quick_start):
    results = []
    for size in (1, 3, 5):
        config, model, source = batches(family, batch_size=5, micro_batch_size=size, number_weight=3.0)
        accelerator = Accelerator(cpu=True)
        micro = source.micro_batches(0, 0, 1)
        loss = accumulate(accelerator, model, micro, config, True, source.token_weight)
        gradients = {name: p.grad for name, p in model.named_parameters()}
        assert all(gradient is not None for gradient in gradients.values())
        results.append((loss, gradients))
    for loss, gradients in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-6)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, results[0][1][name], rtol=1e-4, atol=1e-6)


def test_weights_by_corruption_and_by_token(batches):
    _, _, source = batches(number_weight=3.0)
    batch = collate([source.sample(0)], 0)
    corrupted, number = batch.corrupted[batch.noisy], source.token_weight[batch.target[batch.noisy]] == 3.0
    expected = torch.where(corrupted, 1.0, 0.25) * torch.where(number, 3.0, 1.0)
    counted, weight = position_weights(batch, "uniform", 0.25, source.token_weight)
    assert torch.equal(counted, batch.noisy)
    assert torch.equal(weight, expected)
    counted, weight = position_weights(batch, "masked", 0.25, source.token_weight)
    assert torch.equal(counted, batch.corrupted)
    assert torch.equal(weight, expected[corrupted])


def test_number_tokens_weigh_more(batches, tokenizer):
    _, _, source = batches(number_weight=3.0)
    heavy = [token for token, index in tokenizer.get_vocab().items() if source.token_weight[index] != 1]
    assert {"7", "\u01207", "\u012012"} <= set(heavy)
    assert all(token.removeprefix("\u0120").isdecimal() for token in heavy)
    assert {source.token_weight[tokenizer.token_to_id(token)].item() for token in heavy} == {3.0}


def test_the_loss_is_the_weighted_cross_entropy_of_a_plain_loop(batches):
    _, model, source = batches()
    batch = collate([source.sample(0)], 0)
    with torch.no_grad():
        loss = batch_loss(model, batch, "uniform", with_residual=False, clean_weight=0.5)
        logits = model.denoise(batch.ids, batch.positions, batch.mask)[0].double()
    expected = 0.0
    for at in batch.noisy[0].nonzero().flatten().tolist():
        weight = 1.0 if batch.corrupted[0, at] else 0.5
        expected -= weight * logits[at].log_softmax(-1)[batch.target[0, at]].item()
    assert loss.item() == pytest.approx(expected, rel=1e-5)
