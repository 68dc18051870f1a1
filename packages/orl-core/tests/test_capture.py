"""Captured states are what was handed over, whoever copies them; pages that do not fit are refused beforehand."""

import threading
import time

import pytest
import torch

from orl_core import capture
from orl_core.capture import PageShape, StateCapture, StatePages
from orl_core.errors import CaptureMemoryError, ConfigError, ShapeError

SHAPE = PageShape(rows=3, steps=5, canvas=4, width=2)


def step_tensors(seed, rows=3):
    g = torch.Generator().manual_seed(seed)
    size = (rows, 4)
    return (
        torch.randint(50, size, generator=g),
        torch.randn(*size, 2, generator=g),
        torch.rand(size, generator=g) < 0.5,
        torch.rand(size, generator=g),
        torch.rand(size, generator=g),
    )


def blocks_of(mode, pages, blocks=3, rows=3):
    """Traces of blocks of 5, 4, 3 steps, read after all of them were recorded."""
    pending = []
    with StateCapture(pages, mode) as states:
        for block in range(blocks):
            for step in range(5 - block):
                states.record(step, *step_tensors(10 * block + step, rows))
            for row in range(rows):
                pending.append(states.trace(row, 5 - block - row, 4, torch.full((4,), row), block, 7 + 4 * block))
    return [trace() for trace in pending]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_traces_hold_what_was_recorded(mode):
    traces = blocks_of(mode, StatePages(SHAPE))
    for index, trace in enumerate(traces):
        block, row = divmod(index, 3)
        assert (trace.block, trace.start, trace.steps) == (block, 7 + 4 * block, 5 - block - row)
        assert trace.tokens.tolist() == [row] * 4
        for step in range(trace.steps):
            expected = [tensor[row] for tensor in step_tensors(10 * block + step)]
            found = [x[step] for x in (trace.canvas, trace.z, trace.unresolved, trace.entropy, trace.top_prob)]
            for a, b in zip(expected, found, strict=True):
                assert a.dtype == b.dtype
                assert torch.equal(a, b)


def test_narrow_rows_and_fewer_rows_than_the_pages():
    with StateCapture(StatePages(SHAPE)) as states:
        states.record(0, *step_tensors(0, rows=2))
        trace = states.trace(1, 1, 3, torch.arange(4), 0, 9)
    assert trace().tokens.tolist() == [0, 1, 2]
    assert torch.equal(trace().z[0], step_tensors(0, rows=2)[1][1, :3])


def test_generation_does_not_wait_for_copies_until_too_many_are_in_flight(monkeypatch):
    gate = threading.Event()
    write = StatePages.write

    def slow(self, step, tensors):
        gate.wait(10)
        write(self, step, tensors)

    monkeypatch.setattr(StatePages, "write", slow)
    recorded = []

    def generate(states):
        for step in range(5):
            states.record(step, *step_tensors(step))
            recorded.append(step)

    with StateCapture(StatePages(SHAPE)) as states:
        generation = threading.Thread(target=generate, args=(states,))
        generation.start()
        while len(recorded) < capture._STEPS_IN_FLIGHT:
            time.sleep(0.001)
        time.sleep(0.02)
        assert len(recorded) == capture._STEPS_IN_FLIGHT  # no copy is made yet, and the fifth step waits
        gate.set()
        generation.join()
        trace = states.trace(0, 5, 4, torch.zeros(4), 0, 0)
    assert torch.equal(trace().canvas, torch.stack([step_tensors(step)[0][0] for step in range(5)]))


def test_a_failed_copy_is_raised_when_the_capture_is_left():
    states = StateCapture(StatePages(SHAPE))
    states.record(0, *step_tensors(0)[:4], torch.zeros(3, 9))
    with pytest.raises(RuntimeError, match="size"):
        states.__exit__(None, None, None)


def test_the_worker_ends_with_the_capture():
    with StateCapture(StatePages(SHAPE)) as states:
        states.record(0, *step_tensors(0))
        assert any(thread.name.startswith("orl-capture") for thread in threading.enumerate())
    assert not any(thread.name.startswith("orl-capture") for thread in threading.enumerate())


def test_need_is_stated_before_anything_is_allocated(monkeypatch):
    shape = PageShape(rows=16, steps=48, canvas=256, width=2560)
    assert shape.nbytes == 16 * 48 * 256 * (8 + 4 * 2560 + 1 + 4 + 4)
    message = r"16 rollouts of up to 48 steps.*need 1923 MiB of pages, but 1000 MiB are allowed"
    with pytest.raises(CaptureMemoryError, match=message):
        StatePages(shape, limit_mib=1000)
    monkeypatch.setattr(capture, "available_memory", lambda: 512 * 2**20)
    with pytest.raises(CaptureMemoryError, match="but 512 MiB of memory are available; roll out fewer"):
        StatePages(shape)


def test_available_memory_is_known_here_or_not_at_all():
    memory = capture.available_memory()
    assert memory is None or memory > 2**20


def test_wrong_use_is_refused():
    with pytest.raises(ConfigError, match="capture mode"), StateCapture(StatePages(SHAPE), "later"):  # pyright: ignore
        pass
    with pytest.raises(ConfigError, match="rows is 0"):
        PageShape(rows=0, steps=1, canvas=1, width=1)
    with StateCapture(StatePages(SHAPE)) as states:
        with pytest.raises(ShapeError, match="5 steps"):
            states.record(5, *step_tensors(0))
        with pytest.raises(ShapeError, match="3 rows"):
            states.record(0, *step_tensors(0, rows=4))
