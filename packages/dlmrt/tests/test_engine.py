"""What a user of the engine sees: results, streams, cancelling, errors, and an engine that stays clean."""

import threading

import pytest
import torch

from dlmrt import Engine, GenerationParams
from dlmrt.errors import CheckpointError, NumericsError, RequestError
from dlmrt.result import BlockCommitted, Draft, Finished
from orl_core.protocols import RolloutEngine

EOS, MASK, VOCAB = 256, 258, 264
UNIFORM = {"decoder": {"name": "entropy_bound", "entropy_bound": 2.0, "max_steps": 6}}
MASKED = {"state_family": "masked", "mask_token_id": MASK}


def shown(events):
    return "".join(event.text for event in events if isinstance(event, BlockCommitted | Finished))


@pytest.mark.parametrize("length", range(18))
def test_answer_ends_at_the_end_token_wherever_it_falls_in_a_canvas(scripted_engine, codec, length):
    text = "every place of it."[:length]
    result = scripted_engine(text).generate("?")
    assert result.text == text
    assert result.token_ids == [*codec.encode(text), EOS]
    assert result.finish_reason == "stop"
    blocks = len(text) // 8 + 1
    assert len(result.blocks) == blocks
    assert result.forwards == sum(result.blocks) == 2 * blocks
    assert result.tpf == (len(text) + 1) / (2 * blocks)
    assert result.tpf_commit == (len(text) + 1) / (3 * blocks)
    assert result.prompt_tokens == 2
    assert result.tokens_per_second > 0
    assert result.to_dict()["tpf"] == result.tpf


@pytest.mark.parametrize("count", [1, 7, 8, 9, 16])
def test_max_new_tokens_is_exact(scripted_engine, count):
    result = scripted_engine("abcdefghijklmnopqrstuvwxyz").generate("?", GenerationParams(max_new_tokens=count))
    assert result.text == "abcdefghijklmnopqrstuvwxyz"[:count]
    assert len(result.token_ids) == count
    assert result.finish_reason == "length"
    assert len(result.blocks) == -(-count // 8)


def test_end_token_as_the_last_allowed_token_is_a_stop(scripted_engine):
    assert scripted_engine("abc").generate("?", GenerationParams(max_new_tokens=4)).finish_reason == "stop"


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (("ghij",), "abcdef"),
        (("h",), "abcdefg"),
        (("i",), "abcdefgh"),
        (("nowhere", "klmno"), "abcdefghij"),
        (("xyz", "cd", "bcd"), "a"),
        (("abcdefghijklmnopqrs",), ""),
        (("xyz!",), "abcdefghijklmnopqrstuvwxyz"),
    ],
)
def test_stop_strings_end_the_answer_across_block_borders_and_never_leak(scripted_engine, codec, stop, expected):
    text = "abcdefghijklmnopqrstuvwxyz"
    engine = scripted_engine(text)
    events = list(engine.stream("?", GenerationParams(stop=stop)))
    result = events[-1].result
    assert result.text == shown(events) == expected
    assert result.finish_reason == "stop"
    cut = [expected + word for word in stop if text.startswith(expected + word)]
    assert codec.decode(result.token_ids) == (cut[0] if cut else text)
    assert len(result.blocks) == (len(result.token_ids) - 1) // 8 + 1
    for event in events[:-1]:
        assert not any(word in event.text for word in stop)


def test_stop_token_ids_end_the_answer(scripted_engine):
    result = scripted_engine("abcdefghijkl").generate("?", GenerationParams(stop_token_ids=(ord("j") - 33,)))
    assert result.finish_reason == "stop"
    assert result.text == "abcdefghij"


def test_ignore_eos_decodes_to_the_limit(scripted_engine):
    result = scripted_engine("abc").generate("?", GenerationParams(ignore_eos=True, max_new_tokens=20))
    assert len(result.token_ids) == 20
    assert EOS in result.token_ids
    assert result.finish_reason == "length"


def test_stream_never_shows_half_a_character(scripted_engine):
    text = "1234567é, 12345日本語 and 🙂🙂🙂 end"
    events = list(scripted_engine(text).stream("?"))
    pieces = [event.text for event in events]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == events[-1].result.text == text
    assert len(events) > 4


@pytest.mark.parametrize("offset", range(8))
def test_a_character_that_blocks_divide_is_shown_whole_wherever_it_begins(scripted_engine, offset):
    text = "x" * offset + "🙂é👩‍🚀日"  # four, two, four, three, four and three bytes
    events = list(scripted_engine(text).stream("?"))
    shown_so_far = ""
    for event in events:
        shown_so_far += event.text
        assert text.startswith(shown_so_far)
    assert shown_so_far == events[-1].result.text == text


def test_every_end_token_of_generation_config_ends_an_answer(tiny_engine):
    free = tiny_engine(generation=UNIFORM).generate("hello", GenerationParams(max_new_tokens=20)).token_ids
    for place in (3, 10):
        engine = tiny_engine(generation=UNIFORM | {"eos_token_id": [EOS, free[place]]})
        result = engine.generate("hello", GenerationParams(max_new_tokens=20))
        assert result.token_ids == free[: free.index(free[place]) + 1]
        assert result.finish_reason == "stop"


def test_answer_cut_inside_a_character_leaves_it_out(scripted_engine):
    result = scripted_engine("1234567é").generate("?", GenerationParams(max_new_tokens=8))
    assert result.text == "1234567"
    assert len(result.token_ids) == 8


def test_stream_of_drafts_shows_every_step(tiny_engine):
    engine = tiny_engine(**MASKED, generation={"decoder": {"name": "threshold", "threshold": 0.2}})
    events = list(engine.stream("hi", GenerationParams(max_new_tokens=14), drafts=True))
    drafts = [event for event in events if isinstance(event, Draft)]
    result = events[-1].result
    assert len(drafts) == result.forwards
    assert [max(d.step for d in drafts if d.block == block) for block in range(2)] == result.blocks
    for draft in drafts:
        assert [token == MASK for token in draft.token_ids] == draft.unresolved
        assert sum(text.count("░") for text, unresolved in draft.pieces if unresolved) == sum(draft.unresolved)
    last = drafts[-1]
    assert result.token_ids == (drafts[result.blocks[0] - 1].token_ids + last.token_ids)[:14]
    assert not any(last.unresolved)


def test_without_drafts_the_stream_holds_blocks_only(scripted_engine):
    events = list(scripted_engine("abcdefghijkl").stream("?"))
    assert [type(event) for event in events] == [BlockCommitted, BlockCommitted, Finished]
    assert [event.block for event in events[:-1]] == [0, 1]
    assert [token for event in events[:-1] for token in event.token_ids] == events[-1].result.token_ids


def test_same_request_ten_times_gives_the_same_tokens(tiny_engine):
    engine = tiny_engine(generation=UNIFORM)
    params = GenerationParams(max_new_tokens=20, seed=7, temperature=0.8)
    assert len({tuple(engine.generate("hello", params).token_ids) for _ in range(10)}) == 1


def test_seed_and_temperature_are_honoured(tiny_engine):
    engine = tiny_engine(**MASKED, generation={"decoder": {"name": "threshold", "threshold": 0.4}})

    def tokens(**settings):
        return engine.generate("hello", GenerationParams(max_new_tokens=20, **settings)).token_ids

    assert tokens(seed=1) == tokens(seed=2) == tokens(seed=1, temperature=0)  # greedy and masked: nothing is drawn
    assert tokens(seed=1, temperature=1.0) != tokens(seed=2, temperature=1.0)
    assert tokens(seed=1, temperature=1.0) != tokens(seed=1)


def test_request_equals_its_rollout(tiny_engine):
    from dlmrt.decoding import build_decoder

    engine = tiny_engine(generation=UNIFORM)
    assert isinstance(engine, RolloutEngine)
    params = GenerationParams(max_new_tokens=20, seed=3)
    decoder = build_decoder(engine.model.spec, engine.defaults.decoder, params)
    result = engine.generate(ids=[1, 2, 3], params=params)
    (row,) = engine.rollout([torch.tensor([1, 2, 3])], decoder, max_new_tokens=20, seeds=[3])
    assert row.response_ids.tolist() == result.token_ids
    assert (row.forwards, row.tpf, row.tpf_commit) == (result.forwards, result.tpf, result.tpf_commit)


def test_messages_and_prompt_give_what_their_ids_give(tiny_engine, codec):
    engine = tiny_engine(generation=UNIFORM)
    by_prompt = engine.generate("hello")
    by_messages = engine.generate(messages=[{"role": "user", "content": "hello"}])
    by_ids = engine.generate(ids=codec.encode("hello\n"))
    assert by_prompt.token_ids == by_messages.token_ids == by_ids.token_ids


def test_top_k_residual_of_the_whole_vocabulary_is_exact_and_a_smaller_one_reports_what_it_misses(
    tiny_config, tiny_tensors
):
    raw = tiny_config()
    results = {}
    for k in (None, VOCAB, 3):
        engine = Engine.from_state(raw, tiny_tensors(raw), generation=UNIFORM, z_top_k=k)
        results[k] = engine.generate(ids=[1, 2], params=GenerationParams(max_new_tokens=20))
    assert results[VOCAB].token_ids == results[None].token_ids
    assert results[None].z_missed_mass == 0
    assert results[VOCAB].z_missed_mass < 1e-5
    assert 0.1 < results[3].z_missed_mass < 1


# cancelling, and staying clean


@pytest.mark.parametrize("steps", [0, 1, 3, 5])
def test_cancelled_between_steps(tiny_engine, steps):
    engine = tiny_engine(generation=UNIFORM)
    params = GenerationParams(max_new_tokens=30)
    whole = engine.generate("hello", params)
    asked = []

    def cancel():
        asked.append(None)
        return len(asked) > steps

    result = engine.generate("hello", params, cancel=cancel)
    assert result.finish_reason == "cancelled"
    assert result.token_ids == whole.token_ids[: len(result.token_ids)]
    assert len(result.token_ids) == 8 * len(result.blocks)
    assert result.forwards <= steps
    assert engine.generate("hello", params).token_ids == whole.token_ids


def test_cancelled_by_an_event_of_another_thread(tiny_engine):
    engine, event = tiny_engine(generation=UNIFORM), threading.Event()
    stream = engine.stream("hello", cancel=event, drafts=True)
    next(stream)
    threading.Thread(target=event.set).start()
    assert event.wait(5)
    assert list(stream)[-1].result.finish_reason == "cancelled"


def test_abandoned_and_interleaved_streams_do_not_disturb_each_other(tiny_engine):
    engine = tiny_engine(generation=UNIFORM)
    params = GenerationParams(max_new_tokens=24)
    expected = {prompt: engine.generate(prompt, params).token_ids for prompt in ("one", "another one")}
    abandoned = engine.stream("one", params, drafts=True)
    next(abandoned)
    first, second = engine.stream("one", params, drafts=True), engine.stream("another one", params, drafts=True)
    results = {}
    for prompt, stream in (("one", first), ("another one", second)):
        next(stream)
        results[prompt] = stream
    for event_one, event_two in zip(first, second, strict=False):
        results |= {"one": event_one, "another one": event_two}
    left = [*first, *second]
    finished = [event.result.token_ids for event in [*results.values(), *left] if isinstance(event, Finished)]
    abandoned.close()
    assert expected["one"] in finished
    assert expected["another one"] in finished


def test_not_finite_logits_are_an_error_and_leave_the_engine_clean(scripted_engine):
    engine = scripted_engine("abcdefghijkl")
    engine.generate("?")
    engine.model.poisoned = True
    with pytest.raises(NumericsError, match="NaN"):
        engine.generate("?")
    engine.model.poisoned = False
    assert engine.generate("?").text == "abcdefghijkl"


def test_nan_weights_are_an_error(tiny_config, tiny_tensors):
    raw = tiny_config()
    tensors = tiny_tensors(raw)
    engine = Engine.from_state(raw, tensors, generation=UNIFORM)
    good = engine.generate(ids=[1]).token_ids
    tensors["lm_head.weight"][7, 7] = float("nan")
    with pytest.raises(NumericsError):
        engine.generate(ids=[1])
    with pytest.raises(NumericsError):
        engine.rollout([torch.tensor([1])], engine.prepare(ids=[1]).decoder, max_new_tokens=8, seeds=[0])
    tensors["lm_head.weight"][7, 7] = tiny_tensors(raw)["lm_head.weight"][7, 7]
    assert engine.generate(ids=[1]).token_ids == good


# weights in memory, and from a folder


def test_engine_over_a_state_dict_follows_its_updates(tiny_config, tiny_tensors):
    raw = tiny_config()
    tensors, others = tiny_tensors(raw), tiny_tensors(raw, seed=1)
    engine = Engine.from_state(raw, tensors, generation=UNIFORM)
    first = engine.generate(ids=[1]).token_ids
    other = Engine.from_state(raw, others, generation=UNIFORM).generate(ids=[1]).token_ids
    assert first != other
    for name, tensor in tensors.items():
        tensor.copy_(others[name])
    assert engine.generate(ids=[1]).token_ids == other
    engine.load_state(tiny_tensors(raw))
    assert engine.generate(ids=[1]).token_ids == first


def test_state_that_does_not_fit_is_refused_and_the_old_one_stays(tiny_config, tiny_tensors):
    raw = tiny_config()
    engine = Engine.from_state(raw, tiny_tensors(raw), generation=UNIFORM)
    before = engine.generate(ids=[1]).token_ids
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        engine.load_state({n: t for n, t in tiny_tensors(raw).items() if n != "lm_head.weight"})
    assert engine.generate(ids=[1]).token_ids == before


def test_pretrained_engine_equals_one_over_the_same_tensors_and_cannot_exchange_them(
    checkpoint, tiny_config, tiny_tensors
):
    engine = Engine.from_pretrained(checkpoint, device="cpu")
    raw = tiny_config()
    generation = {"eos_token_id": EOS, "decoder": {"name": "entropy_bound", "max_steps": 6}}
    shared = Engine.from_state(raw, tiny_tensors(raw), codec=engine.codec, generation=generation)
    params = GenerationParams(max_new_tokens=20)
    assert engine.generate("hello", params).token_ids == shared.generate("hello", params).token_ids
    assert engine.name == str(checkpoint)
    with pytest.raises(CheckpointError, match="from_state"):
        engine.load_state({})


def test_defaults_come_from_generation_config(checkpoint):
    engine = Engine.from_pretrained(checkpoint, device="cpu")
    result = engine.generate("hello")
    assert len(result.token_ids) <= 20
    assert max(result.blocks) <= 6
    assert engine.prepare(prompt="hello").decoder.max_steps == 6


def test_default_length_is_cut_to_the_context(checkpoint):
    engine = Engine.from_pretrained(checkpoint, device="cpu")
    assert len(engine.generate(ids=[5] * 90, params=GenerationParams(ignore_eos=True)).token_ids) == 6


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_dtype_is_honoured(checkpoint, dtype):
    engine = Engine.from_pretrained(checkpoint, device="cpu", dtype=dtype)
    assert engine.model.dtype == getattr(torch, dtype)
    assert len(engine.generate("hello", GenerationParams(max_new_tokens=9, ignore_eos=True)).token_ids) == 9


def test_reserved_context_holds_the_longest_request(checkpoint):
    engine = Engine.from_pretrained(checkpoint, device="cpu", context=50)
    reserved = engine._cache
    for length in (1, 7, 8, 49):
        engine.generate(ids=[5] * length, params=GenerationParams(ignore_eos=True, max_new_tokens=50 - length))
        assert engine._cache is reserved
    running = engine.stream(ids=[5], drafts=True)
    next(running)
    engine.generate(ids=[5], params=GenerationParams(max_new_tokens=8))  # meanwhile: on a cache of its own
    running.close()
    assert engine._cache is reserved
    with pytest.raises(RequestError, match="context of 50"):
        engine.generate(ids=[5] * 45, params=GenerationParams(max_new_tokens=6))
    with pytest.raises(RequestError, match="97"):
        Engine.from_pretrained(checkpoint, device="cpu", context=97)


# errors before any work


@pytest.mark.parametrize(
    ("arguments", "params", "message"),
    [
        ({"prompt": ""}, {}, "empty"),
        ({"prompt": " \n"}, {}, "empty"),
        ({"ids": []}, {}, "empty"),
        ({"messages": []}, {}, "empty"),
        ({}, {}, "exactly one"),
        ({"prompt": "a", "ids": [1]}, {}, "exactly one"),
        ({"ids": [VOCAB]}, {}, "token 264"),
        ({"ids": [-1]}, {}, "token -1"),
        ({"ids": [1] * 90}, {"max_new_tokens": 7}, "context of 96"),
        ({"ids": [1] * 96}, {}, "context of 96"),
        ({"ids": [1]}, {"decoder": "beam"}, "beam"),
        ({"ids": [1]}, {"decoder": "threshold"}, "uniform"),
        ({"ids": [1]}, {"entropy_bound": -1.0}, "entropy_bound is -1"),
        ({"ids": [1]}, {"threshold": 0.5}, "no setting threshold"),
        ({"ids": [1]}, {"stop_token_ids": (VOCAB,)}, "stop_token_ids"),
    ],
)
def test_impossible_requests_are_refused_before_any_work(tiny_engine, arguments, params, message):
    engine = tiny_engine(generation=UNIFORM)
    with pytest.raises(RequestError, match=message):
        engine.stream(params=GenerationParams(**params), **arguments)


def test_text_without_a_tokenizer_is_refused(tiny_config, tiny_tensors):
    raw = tiny_config()
    engine = Engine.from_state(raw, tiny_tensors(raw))
    for arguments in ({"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}]}):
        with pytest.raises(RequestError, match="tokenizer"):
            engine.generate(**arguments)
    with pytest.raises(RequestError, match="tokenizer"):
        engine.generate(ids=[1], params=GenerationParams(stop=("a",)))


def test_rollout_refuses_what_does_not_fit(tiny_engine):
    engine = tiny_engine(generation=UNIFORM)
    decoder, prompt = engine.prepare(ids=[1]).decoder, torch.tensor([1, 2])
    masked = tiny_engine(**MASKED).prepare(ids=[1]).decoder
    for prompts, other, settings, message in [
        ([prompt], decoder, {"max_new_tokens": 0, "seeds": [0]}, "max_new_tokens is 0"),
        ([prompt], decoder, {"max_new_tokens": 95, "seeds": [0]}, "context of 96"),
        ([prompt], decoder, {"max_new_tokens": 5, "seeds": [0, 1]}, "2 seeds"),
        ([], decoder, {"max_new_tokens": 5, "seeds": []}, "0 prompts"),
        ([torch.tensor([], dtype=torch.int64)], decoder, {"max_new_tokens": 5, "seeds": [0]}, "empty"),
        ([prompt], masked, {"max_new_tokens": 5, "seeds": [0]}, "masked family"),
    ]:
        with pytest.raises(RequestError, match=message):
            engine.rollout(prompts, other, **settings)


def test_unknown_driver_device_and_dtype_are_refused(checkpoint):
    for settings, message in (
        ({"driver": "warp"}, "warp"),
        ({"device": "abacus"}, "abacus"),
        ({"dtype": "int3"}, "int3"),
    ):
        with pytest.raises(RequestError, match=message):
            Engine.from_pretrained(checkpoint, **settings)
    with pytest.raises(RequestError, match="cuda:99"):
        Engine.from_pretrained(checkpoint, device="cuda:99")
    with pytest.raises(RequestError, match="z_top_k"):
        Engine.from_pretrained(checkpoint, device="cpu", z_top_k=0)


def test_cache_that_does_not_fit_into_memory_is_an_error_with_its_size(tiny_engine, monkeypatch):
    engine = tiny_engine(generation=UNIFORM)

    def full(batch, capacity):
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(engine.model, "new_cache", full)
    with pytest.raises(RequestError, match="MiB"):
        engine.generate(ids=[1])
