"""Philox against its published answers, and the counter layout that every backend must follow."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orl_core.rng import CounterRng, Stream, philox

# kat_vectors of the Random123 library: counter, key, output of philox4x32-10.
KNOWN_ANSWERS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]
words = st.integers(0, 2**32 - 1)
seeds = st.integers(-(2**63), 2**63 - 1)


def philox_loop(counter: list[int], key: list[int]) -> list[int]:
    """Philox-4x32-10 on Python integers."""
    (a, b, c, d), (k, l) = counter, key
    for _ in range(10):
        p, q = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (q >> 32) ^ b ^ k, q % 2**32, (p >> 32) ^ d ^ l, p % 2**32
        k, l = (k + 0x9E3779B9) % 2**32, (l + 0xBB67AE85) % 2**32
    return [a, b, c, d]


def philox_ints(counter: list[int], key: list[int]) -> list[int]:
    return [int(w) for w in philox(*(torch.tensor(x) for x in counter + key))]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter, key, expected):
    assert philox_ints(counter, key) == expected
    assert philox_loop(counter, key) == expected


@given(st.lists(words, min_size=4, max_size=4), st.lists(words, min_size=2, max_size=2))
def test_philox_on_int64_tensors_is_philox_on_integers(counter, key):
    assert philox_ints(counter, key) == philox_loop(counter, key)


@given(seeds, st.sampled_from(Stream), st.integers(0, 2**30 - 1), st.integers(0, 2**31 - 1), st.integers(1, 10**6))
def test_tokens_follow_the_documented_counter_layout(seed, stream, block, step, vocab_size):
    drawn = CounterRng(torch.tensor([seed])).tokens(stream, torch.tensor([block]), torch.tensor([step]), 3, vocab_size)
    key = [seed % 2**32, (seed >> 32) % 2**32]
    word = [philox_loop([0, position, step, 4 * block + stream], key)[0] for position in range(3)]
    assert drawn.tolist() == [[w * vocab_size >> 32 for w in word]]


@given(seeds, st.integers(1, 9))
def test_uniform_draws_follow_the_documented_counter_layout(seed, lanes):
    drawn = CounterRng(torch.tensor([seed])).uniform(Stream.CANDIDATE, torch.tensor([5]), torch.tensor([7]), 2, lanes)
    key = [seed % 2**32, (seed >> 32) % 2**32]
    expected = [
        [
            ((philox_loop([lane // 4, position, 7, 4 * 5 + Stream.CANDIDATE], key)[lane % 4] >> 9) + 0.5) / 2**23
            for lane in range(lanes)
        ]
        for position in range(2)
    ]
    assert drawn.tolist() == [expected]


def test_uniform_draws_never_reach_0_or_1(monkeypatch):
    rng, zero = CounterRng(torch.tensor([0])), torch.tensor([0])
    for word, bound in ((0, 2.0**-24), (2**32 - 1, 1 - 2.0**-24)):
        monkeypatch.setattr("orl_core.rng.philox", lambda *counter, w=word: (torch.full((1, 1, 1), w),) * 4)
        assert rng.uniform(Stream.CANDIDATE, zero, zero, 1, 4).tolist() == [[[bound] * 4]]


@given(st.lists(seeds, min_size=1, max_size=4), st.data())
def test_a_row_of_a_batch_draws_what_it_draws_alone(row_seeds, data):
    block = [data.draw(st.integers(0, 9)) for _ in row_seeds]
    step = [data.draw(st.integers(0, 9)) for _ in row_seeds]
    batch = CounterRng(torch.tensor(row_seeds))
    tokens = batch.tokens(Stream.RENOISE, torch.tensor(block), torch.tensor(step), 5, 100)
    uniform = batch.uniform(Stream.CANDIDATE, torch.tensor(block), torch.tensor(step), 5, 6)
    for i, seed in enumerate(row_seeds):
        alone, b, s = CounterRng(torch.tensor([seed])), torch.tensor([block[i]]), torch.tensor([step[i]])
        assert torch.equal(alone.tokens(Stream.RENOISE, b, s, 5, 100)[0], tokens[i])
        assert torch.equal(alone.uniform(Stream.CANDIDATE, b, s, 5, 6)[0], uniform[i])
        assert torch.equal(alone.tokens(Stream.RENOISE, b, s, 3, 100)[0], tokens[i, :3]), "depends on the length"


@pytest.mark.parametrize("vocab_size", [1, 7, 256, 151_936])
def test_tokens_are_uniform_and_below_the_vocabulary(vocab_size):
    n, bins = 40_000, min(vocab_size, 64)
    rng = CounterRng(torch.arange(4))
    tokens = rng.tokens(Stream.CANVAS, torch.zeros(4, dtype=torch.int64), torch.arange(4), n // 4, vocab_size)
    assert tokens.dtype == torch.int64
    assert tokens.min() >= 0
    assert tokens.max() < vocab_size
    # Bin b holds the tokens t with t * bins // vocab_size = b.
    size = (torch.arange(vocab_size) * bins // vocab_size).bincount(minlength=bins) / vocab_size
    observed = (tokens.flatten() * bins // vocab_size).bincount(minlength=bins)
    chi_square = ((observed - n * size) ** 2 / (n * size)).sum().item()
    degrees = bins - 1
    assert chi_square <= degrees + 4 * (2 * degrees) ** 0.5


def test_uniform_draws_are_uniform():
    zero = torch.zeros(1, dtype=torch.int64)
    u = CounterRng(torch.tensor([3])).uniform(Stream.CANDIDATE, zero, zero, 100, 400).double().flatten()
    observed = (u * 50).long().bincount(minlength=50)
    chi_square = ((observed - 800) ** 2 / 800).sum().item()
    assert chi_square < 49 + 4 * 98**0.5
    assert u.mean().item() == pytest.approx(0.5, abs=4 / (12 * u.numel()) ** 0.5)


def test_draws_of_different_places_are_unrelated():
    """Every pair of (seed, stream, block, step) gives sequences that agree no more often than chance."""
    n, vocab_size = 2000, 16
    sequences = [
        CounterRng(torch.tensor([seed])).tokens(stream, torch.tensor([block]), torch.tensor([step]), n, vocab_size)[0]
        for seed in (0, 1, 2**32)
        for stream in Stream
        for block in (0, 1)
        for step in (0, 1)
    ]
    for i, a in enumerate(sequences):
        shifted = (a[1:] == a[:-1]).double().mean().item()
        assert shifted == pytest.approx(1 / vocab_size, abs=0.03), "neighbouring positions are related"
        for b in sequences[:i]:
            assert (a == b).double().mean().item() == pytest.approx(1 / vocab_size, abs=0.03)


def test_philox_is_that_of_triton(tmp_path):
    """Runs Triton's own philox in its interpreter, in a process of its own since the switch is read at import."""
    pytest.importorskip("triton")
    script = tmp_path / "triton_philox.py"
    script.write_text(
        textwrap.dedent(
            """
            import torch, triton, triton.language as tl

            @triton.jit
            def kernel(out, seed, c1, c2, c3, N: tl.constexpr):
                lane = tl.arange(0, N)
                zero = lane * 0
                w0, w1, w2, w3 = tl.philox(seed, lane, zero + c1, zero + c2, zero + c3)
                tl.store(out + lane, w0.to(tl.int64))
                tl.store(out + N + lane, w1.to(tl.int64))
                tl.store(out + 2 * N + lane, w2.to(tl.int64))
                tl.store(out + 3 * N + lane, w3.to(tl.int64))

            out = torch.zeros(4, 8, dtype=torch.int64)
            kernel[(1,)](out, 0x123456789ABCDEF, 11, 22, 33, N=8)
            print(out.flatten().tolist())
            """
        )
    )
    env = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    seed = 0x123456789ABCDEF
    ours = philox(torch.arange(8), *(torch.tensor(x) for x in (11, 22, 33, seed & 0xFFFFFFFF, seed >> 32)))
    assert [int(w) & 0xFFFFFFFF for w in done.stdout.strip("[]\n").split(",")] == torch.stack(ours).flatten().tolist()
