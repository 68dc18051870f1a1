import sys

import pytest

from orl_eval.endpoints import DecodeSettings, LocalEngine, generation_params, parse_options
from orl_eval.errors import MissingExtraError, SettingError


def test_options_are_numbers_of_the_type_written():
    parsed = parse_options(["entropy_bound=0.05", "max_steps=12", "threshold=1e-3"])
    assert parsed == {"entropy_bound": 0.05, "max_steps": 12, "threshold": 0.001}
    assert [type(value) for value in parsed.values()] == [float, int, float]


@pytest.mark.parametrize("text", ["entropy_bound", "=1", "entropy_bound=", "greedy=true", "threshold=high", ""])
def test_malformed_options_are_refused(text):
    with pytest.raises(SettingError, match="NAME=NUMBER"):
        parse_options([text])


def test_repeated_options_are_refused():
    with pytest.raises(SettingError, match="given twice"):
        parse_options(["a=1", "a=2"])


def test_without_the_engine_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "dlmrt", None)
    with pytest.raises(MissingExtraError, match=r'pip install "orl-eval\[local\]"'):
        LocalEngine.load("embedded:base", DecodeSettings())


@pytest.mark.parametrize(
    ("options", "message"),
    [({"bound": 1}, r"'bound' is unknown; there are: .*entropy_bound"), ({"max_steps": 1.5}, "whole number")],
)
def test_options_that_no_decoder_has_are_refused(options, message):
    with pytest.raises(SettingError, match=message):
        generation_params(DecodeSettings(options=options))


def test_settings_become_generation_params():
    settings = DecodeSettings("threshold", {"threshold": 0.8, "steps": 4}, 0.5, residual=False, max_new_tokens=9)
    params = generation_params(settings)
    assert (params.decoder, params.temperature, params.residual, params.max_new_tokens) == ("threshold", 0.5, False, 9)
    assert params.decoder_options() == {"threshold": 0.8, "steps": 4}
