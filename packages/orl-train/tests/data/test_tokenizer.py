"""The byte-level tokenizer: lossless, deterministic, and small numbers are single tokens."""

import json

import pytest
from transformers import AutoTokenizer

from orl_core.arithmetic import problems
from orl_core.arithmetic.problem import MAX_VALUE
from orl_train.data.tokenizer import EOS, MASK, PAD, build_tokenizer, tokenizer_config
from orl_train.pretrain import arithmetic_tokenizer


@pytest.fixture(scope="module")
def texts():
    return [p.prompt + "\n" + p.solution for p in problems("train", 100, seed=5)]


def test_special_tokens_come_first(tokenizer):
    assert [tokenizer.token_to_id(token) for token in (PAD, EOS, MASK)] == [0, 1, 2]


def test_every_byte_can_be_encoded(tokenizer):
    text = "".join(chr(code) for code in range(1, 0x250)) + "\u20ac\U0001f34e\u00a0\u3042"
    assert set(text.encode()) >= set(range(1, 0xC0))
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    vocabulary = tokenizer.get_vocab()
    assert sum(len(token) == 1 for token in vocabulary) >= 256  # one token for each byte, so nothing is unknown


def test_problems_survive_a_round_trip(tokenizer, texts):
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_numbers_are_single_tokens_and_line_breaks_stand_alone():
    tokenizer = arithmetic_tokenizer(0, texts=3000)
    for number in range(MAX_VALUE + 1):
        assert tokenizer.encode(f" {number}").tokens == [f"\u0120{number}"]
    assert tokenizer.encode(" 123").tokens == ["\u012012", "3"]
    assert tokenizer.encode(".\n\nThen").tokens == [".", "\u010a", "\u010a", "Then"]


def test_special_tokens_are_not_decoded(tokenizer):
    ids = tokenizer.encode("Answer: 14").ids
    assert tokenizer.decode([*ids, tokenizer.token_to_id(EOS), tokenizer.token_to_id(PAD)]) == "Answer: 14"


def test_the_same_texts_give_the_same_tokenizer(texts):
    first, second = build_tokenizer(texts, min_frequency=5), build_tokenizer(iter(texts), min_frequency=5)
    assert first.to_str() == second.to_str()
    assert first.to_str() != build_tokenizer(texts[:50], min_frequency=5).to_str()


def test_transformers_loads_it_and_renders_a_prompt(tokenizer, tmp_path):
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config()))
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "Tom has 12 apples."}]
    assert loaded.apply_chat_template(messages, tokenize=False) == "Tom has 12 apples.\n"
    assert loaded("Tom has 12 apples.")["input_ids"] == tokenizer.encode("Tom has 12 apples.").ids
    assert (loaded.eos_token, loaded.pad_token, loaded.mask_token) == (EOS, PAD, MASK)
