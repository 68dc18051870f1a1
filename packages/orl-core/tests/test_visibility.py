"""The staircase predicate against plain loops and against the mask of a recorded block-diffusion run."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orl_core.errors import ConfigError, ShapeError
from orl_core.visibility import PADDING_SEGMENT, Visibility, block_start, is_visible, staircase


def staircase_loop(length: int, prompt: int, block: int, block_causal: bool) -> list[list[bool]]:
    """[clean 0..length | noisy prompt..length]; what each token may see, said in words.

    Clean tokens see the clean past (block-causal: also the rest of their block, the prompt being the first block).
    Noisy tokens see the clean tokens of all blocks before theirs, and the noisy tokens of their own block.
    """

    def block_of(position: int) -> int:
        return -1 if position < prompt else (position - prompt) // block

    tokens = [("clean", p) for p in range(length)] + [("noisy", p) for p in range(prompt, length)]
    mask = []
    for q_kind, q in tokens:
        row = []
        for k_kind, k in tokens:
            if q_kind == "noisy":
                row.append(block_of(k) < block_of(q) if k_kind == "clean" else block_of(k) == block_of(q))
            else:
                row.append(k_kind == "clean" and (k <= q or (block_causal and block_of(k) <= block_of(q))))
        mask.append(row)
    return mask


@pytest.mark.parametrize("variant", ["token_causal", "block_causal"])
def test_staircase_is_the_recorded_mask(load_golden, variant):
    golden, _ = load_golden("staircase")
    visibility = staircase(40, 0, 8, block_causal=variant == "block_causal")
    assert torch.equal(visibility.dense_mask(), golden[variant])


@given(st.integers(1, 14), st.data(), st.integers(1, 6), st.booleans())
def test_staircase_is_the_definition_in_plain_loops(length, data, block, block_causal):
    prompt = data.draw(st.integers(0, length))
    mask = staircase(length, prompt, block, block_causal=block_causal).dense_mask()
    assert mask.tolist() == staircase_loop(length, prompt, block, block_causal)


@given(st.integers(1, 14), st.data(), st.integers(1, 6))
def test_clean_tokens_left_out_change_nothing_for_the_others(length, data, block):
    prompt = data.draw(st.integers(0, length))
    clean = data.draw(st.integers(max(range(prompt, length, block), default=prompt), length))
    full = staircase(length, prompt, block).dense_mask()
    kept = torch.cat([torch.arange(clean), torch.arange(length, 2 * length - prompt)])
    assert torch.equal(staircase(length, prompt, block, clean_length=clean).dense_mask(), full[kept][:, kept])


tokens = st.lists(
    st.tuples(st.integers(-1, 2), st.integers(0, 9), st.integers(0, 2), st.integers(0, 10)), min_size=1, max_size=12
)


@given(tokens)
def test_the_dense_mask_is_the_predicate_in_a_loop(packed):
    segment, position, state, limit = (torch.tensor(column) for column in zip(*packed, strict=True))
    mask = Visibility(segment, position, state, limit).dense_mask()
    for i, (segment_q, _, state_q, limit_q) in enumerate(packed):
        for j, (segment_k, position_k, state_k, _) in enumerate(packed):
            if segment_q == PADDING_SEGMENT:
                expected = i == j
            elif segment_q != segment_k:
                expected = False
            elif state_k == 0:
                expected = position_k < limit_q
            else:
                expected = state_k == state_q
            assert mask[i, j].item() == expected
            predicate = is_visible(segment_q, state_q, limit_q, segment_k, position_k, state_k)
            assert bool(predicate) == (expected and segment_q != PADDING_SEGMENT)


def test_padding_sees_only_itself_and_nobody_sees_it():
    row = Visibility(*(torch.tensor(x) for x in ([0, 0, -1, -1], [0, 1, 2, 3], [0, 0, 0, 0], [1, 2, 9, 9])))
    assert row.dense_mask().int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]


def test_a_state_sees_neither_its_answer_nor_later_blocks_nor_other_states():
    visibility = staircase(9, 3, 3)
    mask = visibility.dense_mask()
    first = slice(9, 12)  # noisy block at 3..6
    assert mask[first, 0:3].all(), "its context"
    assert not mask[first, 3:9].any(), "its clean answer and the block after it"
    assert mask[first, first].all(), "itself, both ways"
    assert not mask[first, 12:].any(), "the other noisy block"
    assert not mask[:9, 9:].any(), "clean tokens see no noise"


def test_leading_dimensions_are_rows_of_their_own():
    rows = [staircase(5, 2, 2), staircase(5, 2, 3)]
    names = ("segment", "position", "state", "limit")
    batch = Visibility(**{name: torch.stack([getattr(row, name) for row in rows]) for name in names})
    assert torch.equal(batch.dense_mask(), torch.stack([r.dense_mask() for r in rows]))


@given(st.integers(0, 30), st.integers(0, 10), st.integers(1, 7))
def test_block_start(position, first, block):
    expected = 0 if position < first else max(s for s in range(first, position + 1, block))
    assert block_start(torch.tensor([position]), first, block).tolist() == [expected]


def test_wrong_input_is_refused():
    with pytest.raises(ShapeError, match="must agree"):
        Visibility(torch.zeros(3), torch.zeros(3), torch.zeros(4), torch.zeros(3))
    with pytest.raises(ConfigError, match="block_length is 0"):
        staircase(5, 2, 0)
    with pytest.raises(ConfigError, match="prompt_length is 6"):
        staircase(5, 6, 2)
    with pytest.raises(ConfigError, match=r"clean_length is 3; it must lie in \[4, 5\]"):
        staircase(5, 2, 2, clean_length=3)
