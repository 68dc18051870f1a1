"""The step's contract: static buffers, no device-to-host read."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dlmrt.cache import canvas_span
from dlmrt.loop.draws import BlockDraws
from dlmrt.loop.step import Denoising
from dlmrt.models.qwen3 import Qwen3, Qwen3Config
from orl_core.decoders import DraftEdit, EntropyBound, Threshold
from orl_core.rng import CounterRng, Stream

VOCAB, MASK, CANVAS = 264, 258, 8
DECODERS = {
    "entropy_bound": EntropyBound(VOCAB, max_steps=5),
    "entropy_bound-sampled": EntropyBound(VOCAB, max_steps=5, greedy=False),
    "threshold": Threshold(MASK, CANVAS),
    "threshold-sampled": Threshold(MASK, CANVAS, sampling_temperature=0.5),
    "draft_edit": DraftEdit(MASK, CANVAS),
}
HOST_READS = {
    "_local_scalar_dense",
    "is_nonzero",
    "nonzero",
    "masked_select",
    "equal",
    "item",
    "unique_dim",
    "_unique2",
}


class NoHostRead(TorchDispatchMode):
    """Fails on every operation that reads a value on the host or has a shape that depends on data."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in HOST_READS:
            raise AssertionError(f"a step called {name}, which reads from the device")
        if name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1]):
            raise AssertionError("a step indexed with a bool tensor, whose result has a shape that depends on data")
        return func(*args, **(kwargs or {}))


def denoising(raw, tensors, decoder, starts, device="cpu", **options):
    model = Qwen3.from_tensors(Qwen3Config.from_json(raw), {name: t.to(device) for name, t in tensors.items()})
    buffers, rows = Denoising(model, decoder, len(starts), **options), len(starts)
    span = canvas_span(starts, [CANVAS] * rows, CANVAS, device)
    shape = (rows, CANVAS)
    editable, fixed = torch.ones(shape, dtype=torch.bool, device=device), torch.zeros(shape, dtype=torch.int64)
    cache = model.new_cache(rows, 32)
    buffers.begin(span, cache, fixed.to(device), editable, seeds=[3] * rows, blocks=[0] * rows)
    return buffers


@pytest.fixture
def raw(tiny_config):
    def build(decoder):
        masked = decoder.family == "masked"
        return tiny_config(state_family=decoder.family, mask_token_id=MASK if masked else None)

    return build


@pytest.mark.parametrize("starts", [[0], [4, 9]], ids=["one row", "rows of different lengths"])
@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("options", [{}, {"residual": False}, {"z_top_k": 4}], ids=str)
def test_step_reads_nothing_from_the_device(raw, tiny_tensors, name, starts, options):
    settings = raw(DECODERS[name])
    buffers = denoising(settings, tiny_tensors(settings), DECODERS[name], starts, **options)
    with NoHostRead():
        buffers.step()
        buffers.step()
    assert buffers.state.step.tolist() == [2] * len(starts)


def test_guard_notices_host_reads():
    for read in (torch.Tensor.item, bool, torch.Tensor.nonzero, lambda t: torch.ones(1)[t[None] > 0]):
        with pytest.raises(AssertionError, match="a step"), NoHostRead():
            read(torch.tensor(1))


@pytest.mark.parametrize("name", DECODERS)
def test_step_runs_on_the_meta_device_where_nothing_can_be_read(raw, tiny_tensors, name):
    settings = raw(DECODERS[name])
    buffers = denoising(settings, tiny_tensors(settings), DECODERS[name], [4, 9], device="meta")
    buffers.step()
    assert buffers.z.is_meta


@pytest.mark.parametrize("name", DECODERS)
def test_rows_that_are_done_are_left_out_and_nothing_else_changes(raw, tiny_tensors, name):
    settings = raw(DECODERS[name])
    left_out, whole = (denoising(settings, tiny_tensors(settings), DECODERS[name], [4, 9, 2]) for _ in range(2))
    for buffers in (left_out, whole):
        buffers.step()
        buffers.state.done[1] = True
    running = (~left_out.state.done).nonzero().squeeze(-1)
    left_out.skip_done()
    assert (left_out.computed, whole.computed) == (len(running), 3)
    assert 1 not in running.tolist()
    for _ in range(2):
        left_out.step()
        whole.step()
    assert left_out.state.step.tolist() == whole.state.step.tolist()
    for field in ("canvas", "answer", "unresolved", "answer_prob"):
        torch.testing.assert_close(getattr(left_out.state, field), getattr(whole.state, field))
    torch.testing.assert_close(left_out.z[running], whole.z[running], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(left_out.entropy[running], whole.entropy[running], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", DECODERS)
def test_step_writes_its_buffers_in_place(raw, tiny_tensors, name):
    settings = raw(DECODERS[name])
    buffers = denoising(settings, tiny_tensors(settings), DECODERS[name], [4])
    state = buffers.state
    tensors = [getattr(state, field) for field in type(state).__slots__]
    tensors += [buffers.z, buffers.entropy, buffers.top_prob, buffers.signal]
    places = [tensor.data_ptr() for tensor in tensors]
    assert not buffers.z.any()
    buffers.step()
    assert buffers.state is state
    assert [tensor.data_ptr() for tensor in tensors] == places
    assert buffers.z.any()
    assert buffers.signal.tolist() == [1, 0]


def test_not_finite_logits_are_signalled(raw, tiny_tensors):
    decoder = DECODERS["threshold"]
    settings = raw(decoder)
    for value in (float("nan"), float("inf"), float("-inf")):
        tensors = tiny_tensors(settings)
        tensors["lm_head.weight"][5] = value
        buffers = denoising(settings, tensors, decoder, [4])
        buffers.step()
        assert buffers.signal[1] > 0


def test_block_draws_are_those_of_the_counter_generator():
    seeds, blocks = torch.tensor([5, -7]), torch.tensor([0, 3])
    draws = BlockDraws(2, 6, steps=4, vocab_size=VOCAB, device=torch.device("cpu"))
    draws.begin(seeds, blocks)
    plain = CounterRng(seeds)
    for step in ([0, 0], [1, 3], [3, 2]):
        at = torch.tensor(step)
        for stream in (Stream.RENOISE, Stream.CANVAS):
            expected = plain.tokens(stream, blocks, at, 6, VOCAB)
            assert torch.equal(draws.tokens(stream, blocks, at, 6, VOCAB), expected)
        expected = plain.uniform(Stream.CANDIDATE, blocks, at, 6, 9)
        assert torch.equal(draws.uniform(Stream.CANDIDATE, blocks, at, 6, 9), expected)
