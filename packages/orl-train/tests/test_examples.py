"""The example launch files are ones that accelerate reads and that name the model's layers."""

import subprocess
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file

from orl_train.models.qwen_dlm import QwenDLMForBlockDiffusion
from orl_train.optim import RESIDUAL_PREFIX

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize(("file", "machines"), [("fsdp2-1x8.yaml", 1), ("fsdp2-multinode.yaml", 4)])
def test_accelerate_reads_the_configuration(file, machines):
    config = load_config_from_file(str(EXAMPLES / file))
    assert (config.distributed_type, config.num_machines, config.num_processes) == ("FSDP", machines, 8 * machines)
    assert config.fsdp_config["fsdp_version"] == 2
    assert config.fsdp_config["fsdp_ignored_modules"] == RESIDUAL_PREFIX.removesuffix(".")
    assert config.fsdp_config["fsdp_transformer_layer_cls_to_wrap"] in QwenDLMForBlockDiffusion._no_split_modules


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.sh")), ids=lambda path: path.name)
def test_scripts_are_valid_and_use_files_that_exist(script):
    subprocess.run(["bash", "-n", str(script)], check=True)
    (config,) = {part for part in script.read_text().replace('"', " ").split() if part.endswith(".yaml")}
    assert (EXAMPLES / Path(config).name).is_file()
