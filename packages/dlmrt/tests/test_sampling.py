"""top-k and top-p, several answers, log-probabilities and the stop at repetitions, as a user of the engine sees."""

import json
import math

import pytest
import torch

from dlmrt import GenerationParams
from dlmrt.decoding import build_decoder
from dlmrt.errors import RequestError
from dlmrt.loop.decode import repeats
from dlmrt.result import BlockCommitted

EOS, MASK = 256, 258
MASKED = {"state_family": "masked", "mask_token_id": MASK}
DECODERS = {
    "entropy_bound": {"name": "entropy_bound", "entropy_bound": 2.0, "max_steps": 6},
    "threshold": {"name": "threshold", "threshold": 0.3},
    "draft_edit": {"name": "draft_edit", "threshold": 0.25, "edit_threshold": 0.15, "max_post_steps": 4},
}


@pytest.fixture
def engine_of(tiny_engine):
    def build(name, **generation):
        family = {} if name == "entropy_bound" else MASKED
        return tiny_engine(**family, generation={"decoder": DECODERS[name]} | generation)

    return build


@pytest.mark.parametrize("name", DECODERS)
def test_sampling_one_token_is_greedy_and_more_are_not(engine_of, name):
    engine = engine_of(name)

    def tokens(**settings):
        return engine.generate("hello", GenerationParams(max_new_tokens=18, **settings)).token_ids

    greedy = tokens()
    assert tokens(temperature=1.0, top_k=1) == tokens(temperature=1.0, top_p=1e-6) == greedy
    assert tokens(temperature=1.0) == tokens(temperature=1.0, top_k=264, top_p=1.0)
    assert len({tuple(tokens(temperature=1.0, top_k=k)) for k in (1, 3, 264)}) == 3


@pytest.mark.parametrize("settings", [{"top_k": 5}, {"top_p": 0.9}, {"top_k": 5, "top_p": 0.9, "temperature": 0.0}])
def test_top_k_and_top_p_are_refused_by_name_where_nothing_is_sampled(engine_of, settings):
    for name in DECODERS:
        with pytest.raises(RequestError, match=r"top_[kp].*temperature above 0"):
            engine_of(name).prepare(GenerationParams(**settings), ids=[1])


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("sampled", [{}, {"temperature": 0.8, "top_k": 20}])
def test_answers_of_a_batch_are_those_of_their_seeds(engine_of, name, sampled):
    engine = engine_of(name, eos_token_id=list(range(0, 264, 9)))
    settings = {"max_new_tokens": 30, "logprobs": True, **sampled}
    together = engine.generate_all("hello", GenerationParams(n=3, seed=4, **settings))
    alone = [engine.generate("hello", GenerationParams(seed=4 + i, **settings)) for i in range(3)]
    for got, expected in zip(together, alone, strict=True):
        for field in ("token_ids", "text", "finish_reason", "blocks", "seed", "prompt_tokens"):
            assert getattr(got, field) == getattr(expected, field), field
        assert got.logprobs == pytest.approx(expected.logprobs, abs=1e-3)
    if sampled:
        assert len({tuple(result.token_ids) for result in together}) == 3


def test_answers_of_a_batch_end_at_stop_strings_of_their_own(engine_of):
    engine = engine_of("threshold")
    settings = {"max_new_tokens": 24, "temperature": 1.0}
    free = engine.generate_all(ids=[3], params=GenerationParams(n=2, **settings))
    stop = tuple(result.text[place] for result, place in zip(free, (1, 4), strict=True))
    together = engine.generate_all(ids=[3], params=GenerationParams(n=2, stop=stop, **settings))
    alone = [engine.generate(ids=[3], params=GenerationParams(seed=i, stop=stop, **settings)) for i in (0, 1)]
    assert [result.text for result in together] == [result.text for result in alone]
    assert [result.finish_reason for result in together] == ["stop", "stop"]


def test_several_answers_can_be_cancelled_and_are_no_single_answer(engine_of):
    engine = engine_of("threshold")
    asked = []
    results = engine.generate_all(
        ids=[1], params=GenerationParams(n=2), cancel=lambda: asked.append(1) or len(asked) > 3
    )
    assert [result.finish_reason for result in results] == ["cancelled"] * 2
    for call in (engine.generate, engine.stream):
        with pytest.raises(RequestError, match="generate_all"):
            call(ids=[1], params=GenerationParams(n=2))


@pytest.mark.parametrize("name", DECODERS)
def test_logprobs_are_those_of_the_step_that_wrote_the_token(engine_of, name):
    """From the captured states of the same run: greedy, so that a written token has the step's top probability."""
    engine = engine_of(name)
    params = GenerationParams(max_new_tokens=20, logprobs=True, seed=2)
    result = engine.generate(ids=[1, 2, 3], params=params)
    decoder = build_decoder(engine.model.spec, engine.defaults.decoder, params)
    (row,) = engine.rollout([torch.tensor([1, 2, 3])], decoder, max_new_tokens=20, seeds=[2])
    expected = []
    for block in row.blocks:
        canvases = [*block.canvas, block.tokens]
        for place in range(len(block.tokens)):
            written = [step for step in range(block.steps) if canvases[step][place] != canvases[step + 1][place]]
            step = block.steps - 1 if name == "entropy_bound" else written[-1]
            expected.append(math.log(block.top_prob[step][place]))
    assert result.logprobs == pytest.approx(expected[:20], abs=1e-5)
    assert min(result.logprobs) < -0.1
    assert json.loads(json.dumps(result.to_dict()))["logprobs"] == result.logprobs


def test_logprobs_come_with_the_blocks_and_only_if_asked_for(scripted_engine):
    engine = scripted_engine("abcdefghijklmnop")
    params = GenerationParams(logprobs=True, stop=("kl",))
    *blocks, end = engine.stream("?", params)
    assert [len(block.logprobs) for block in blocks] == [8, 4]
    assert [value for block in blocks for value in block.logprobs] == end.result.logprobs
    assert len(end.result.logprobs) == len(end.result.token_ids)
    plain = list(engine.stream("?"))
    assert plain[-1].result.logprobs is None
    assert all(block.logprobs is None for block in plain if isinstance(block, BlockCommitted))


@pytest.mark.parametrize(
    ("text", "stop", "kept"),
    [
        ("abc", 2, 24),  # abc and 5, 8, 8 times the token that follows a script
        ("abc", 3, 32),
        ("abcdefg" * 6, 2, 16),  # a period of 7 tokens
        ("abcdefgh" * 6, 2, 16),
        ("abcdefghi" * 6, 2, 72),  # a period of 9 is longer than a canvas: what follows repeats
    ],
)
def test_an_answer_that_repeats_itself_is_ended(scripted_engine, text, stop, kept):
    engine = scripted_engine(text, endless=True)
    result = engine.generate("?", GenerationParams(repetition_stop=stop, max_new_tokens=100))
    assert (result.finish_reason, len(result.token_ids)) == ("repetition", kept)
    assert result.text.startswith(text[:kept])
    assert engine.generate("?", GenerationParams(max_new_tokens=100)).finish_reason == "length"


def test_an_end_token_or_the_limit_come_before_a_repetition(scripted_engine):
    params = GenerationParams(repetition_stop=2, max_new_tokens=16)
    assert scripted_engine("a" * 15).generate("?", params).finish_reason == "stop"
    assert scripted_engine("a" * 16).generate("?", params).finish_reason == "length"


@pytest.mark.parametrize(
    ("tokens", "length", "longest", "expected"),
    [
        ([1, 2, 1, 2], 4, 2, True),
        ([9, 1, 2, 1, 2], 4, 2, True),
        ([1, 2, 1, 2], 4, 1, False),
        ([1, 2, 3, 1, 2, 3, 1], 6, 3, True),
        ([1, 2, 3, 1, 2, 4], 6, 3, False),
        ([1, 1, 1], 4, 2, False),
        ([], 4, 2, False),
    ],
)
def test_repeats(tokens, length, longest, expected):
    assert repeats(tokens, length, longest) is expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"top_k": 0}, "top_k is 0"),
        ({"top_p": 0.0}, "top_p is 0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"top_p": float("nan")}, "top_p is nan"),
        ({"n": 0}, "n is 0"),
        ({"n": 2, "seed": 2**63 - 1}, "n is 2"),
        ({"repetition_stop": 1}, "repetition_stop is 1"),
        ({"edit_blocks": -1}, "edit_blocks is -1"),
    ],
)
def test_wrong_parameters_are_refused_when_they_are_made(settings, message):
    with pytest.raises(RequestError, match=message):
        GenerationParams(**settings)
