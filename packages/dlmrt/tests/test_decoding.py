import pytest

from dlmrt.decoding import DecoderSettings, build_decoder, settings_from_json
from dlmrt.errors import ModelConfigError, RequestError
from dlmrt.params import GenerationParams
from orl_core.decoders import DraftEdit, EntropyBound, Threshold


@pytest.fixture
def uniform(tiny_engine):
    return tiny_engine().model.spec


@pytest.fixture
def masked(tiny_engine):
    return tiny_engine(state_family="masked", mask_token_id=258).model.spec


def test_checkpoint_settings_are_used_and_the_request_overrides_them(uniform, masked):
    default = DecoderSettings("entropy_bound", {"entropy_bound": 0.5, "max_steps": 9})
    got = build_decoder(uniform, default, GenerationParams(max_steps=4))
    assert got == EntropyBound(264, entropy_bound=0.5, max_steps=4)
    default = DecoderSettings("threshold", {"threshold": 0.6})
    assert build_decoder(masked, default, GenerationParams()) == Threshold(258, 8, threshold=0.6)


def test_settings_of_the_default_decoder_do_not_reach_another_one(masked):
    default = DecoderSettings("threshold", {"threshold": 0.6})
    got = build_decoder(masked, default, GenerationParams(decoder="draft_edit", edit_threshold=0.4))
    assert got == DraftEdit(258, 8, edit_threshold=0.4)


def test_temperature(uniform, masked):
    default = DecoderSettings("entropy_bound", {"t_min": 0.4, "t_max": 0.8, "greedy": False})
    assert build_decoder(uniform, default, GenerationParams()) == EntropyBound(264, t_min=0.4, t_max=0.8, greedy=False)
    greedy = build_decoder(uniform, default, GenerationParams(temperature=0))
    assert greedy == EntropyBound(264, t_min=0.4, t_max=0.8, greedy=True)
    sampled = build_decoder(uniform, default, GenerationParams(temperature=0.5))
    assert sampled == EntropyBound(264, t_min=0.5, t_max=0.5, greedy=False)
    with pytest.raises(RequestError, match="t_max"):
        build_decoder(uniform, default, GenerationParams(temperature=0.5, t_max=0.9))
    default = DecoderSettings("threshold", {"sampling_temperature": 0.9})
    for temperature in (0, 0.3):
        got = build_decoder(masked, default, GenerationParams(temperature=temperature))
        assert got.sampling_temperature == temperature


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"decoder": "greedy"}, "'greedy' is unknown.*entropy_bound"),
        ({"decoder": "entropy_bound"}, "masked family.*threshold"),
        ({"edit_threshold": 0.5}, "threshold has no setting edit_threshold"),
        ({"max_steps": 5}, "no setting max_steps"),
        ({"threshold": 1.5}, "threshold is 1.5"),
        ({"threshold": -0.1}, "threshold is -0.1"),
        ({"threshold": float("nan")}, "threshold is nan"),
        ({"steps": 9}, "steps is 9"),
        ({"decoder": "draft_edit", "edit_threshold": 2.0}, "edit_threshold is 2"),
        ({"decoder": "draft_edit", "max_post_steps": -1}, "max_post_steps is -1"),
        ({"decoder": "draft_edit", "min_transfer": 0}, "min_transfer is 0"),
    ],
)
def test_wrong_settings_are_refused_by_name(masked, settings, message):
    with pytest.raises(RequestError, match=message):
        build_decoder(masked, DecoderSettings("threshold"), GenerationParams(**settings))


@pytest.mark.parametrize("raw", [{}, {"name": "beam"}, {"name": "threshold", "width": 3}])
def test_wrong_checkpoint_settings_are_refused(raw):
    with pytest.raises(ModelConfigError, match=r"decoder\.name|width"):
        settings_from_json(raw)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"seed": 2**63}, "seed is"),
        ({"stop": "abc"}, "stop is 'abc'"),
        ({"stop": ("",)}, "stop is"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
    ],
)
def test_wrong_parameters_are_refused_when_they_are_made(settings, message):
    with pytest.raises(RequestError, match=message):
        GenerationParams(**settings)


def test_only_given_settings_count_as_overrides():
    assert GenerationParams(seed=3, temperature=0.5).decoder_options() == {}
    assert GenerationParams(threshold=0.0, max_steps=3).decoder_options() == {"max_steps": 3, "threshold": 0.0}
