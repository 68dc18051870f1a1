"""Settings are read from TOML, and every mistake is named."""

import pytest

from orl_core.errors import ConfigError
from orl_train.config import build_config, load_config, to_dict
from orl_train.orl import OrlConfig
from orl_train.pretrain import PretrainConfig


@pytest.fixture
def write(tmp_path):
    def to_file(text):
        path = tmp_path / "run.toml"
        path.write_text(text)
        return path

    return to_file


def test_settings_are_read_and_the_rest_are_defaults(write):
    config = load_config(PretrainConfig, write("steps = 7\n[model]\nlayers = 2\n[optimizer]\nmuon_lr = 1\n"))
    assert (config.steps, config.model.layers, config.optimizer.muon_lr) == (7, 2, 1.0)
    assert isinstance(config.optimizer.muon_lr, float)
    assert config.batch_size == PretrainConfig(steps=1).batch_size


def test_overrides_win_and_make_missing_tables(write):
    path = write("steps = 7\n[model]\nlayers = 2\n")
    config = load_config(PretrainConfig, path, {"steps": 9, "model.layers": 3, "noise.low": 0.2})
    assert (config.steps, config.model.layers, config.noise.low) == (9, 3, 0.2)


def test_settings_survive_a_round_trip(write):
    config = load_config(PretrainConfig, write('steps = 7\n[model]\nstate_family = "masked"\n'))
    assert build_config(PretrainConfig, to_dict(config), "again") == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps = 7\nspeed = 1", r"unknown setting 'speed'; allowed are steps, seed"),
        ("steps = 7\n[model]\nwidth = 1", r"\[model\]: unknown setting 'width'; allowed are hidden_size"),
        ("steps = '7'", r"steps is '7'; it must be of type int"),
        ("steps = true", r"steps is True; it must be of type int"),
        ("steps = 7.5", r"steps is 7.5; it must be of type int"),
        ("steps = 7\nclean_weight = 'x'", r"clean_weight is 'x'; it must be of type float"),
        ("steps = 7\nmodel = 3", r"model must be a table, not 3"),
        ("steps = 7\n[model]\nstate_family = 'absorbing'", r"'absorbing'; it must be one of masked, uniform"),
        ("seed = 7", r"missing 1 required positional argument: 'steps'"),
        ("steps = 0", r"steps is 0; it must be at least 1"),
        ("steps = 7\nprecision = 'fp8'", r"precision is 'fp8'; it must be one of no, bf16"),
        ("steps = 7\n[optimizer]\nmuon_lr = 0", r"muon_lr is 0.0; it must be greater than 0"),
        ("steps = ", r"is not valid TOML"),
    ],
)
def test_a_mistake_is_named(write, text, message):
    with pytest.raises(ConfigError, match=message):
        load_config(PretrainConfig, write(text))


def test_an_override_of_a_value_as_a_table_is_named(write):
    with pytest.raises(ConfigError, match=r"steps is no table, so steps.more cannot be set"):
        load_config(PretrainConfig, write("steps = 7"), {"steps.more": 1})


def test_an_optional_setting_is_checked_as_the_one_that_is_not():
    assert build_config(OrlConfig, {"start": "here", "precision": None}, "run").precision is None
    assert build_config(OrlConfig, {"start": "here", "precision": "bf16"}, "run").precision == "bf16"
    with pytest.raises(ConfigError, match=r"run: precision is 'fp8'; it must be one of no, bf16"):
        build_config(OrlConfig, {"start": "here", "precision": "fp8"}, "run")
    with pytest.raises(ConfigError, match=r"run: reference is 3; it must be of type str"):
        build_config(OrlConfig, {"start": "here", "reference": 3}, "run")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no configuration file .*nowhere\.toml"):
        load_config(PretrainConfig, tmp_path / "nowhere.toml")


def test_a_folder_is_no_configuration(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(PretrainConfig, tmp_path)
