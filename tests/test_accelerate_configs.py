from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from specdistill.common.project import ROOT

CONFIGURATIONS = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
OWNED_BY_RECIPES = {
    "gradient_accumulation_steps",
    "gradient_clipping",
    "train_batch_size",
    "mixed_precision",
}


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda path: path.stem)
def test_accelerate_reads_every_configuration(path: Path):
    """Accelerate refuses unknown keys, and a launch needs no more than the head node's address."""
    configuration = load_config_from_file(str(path))
    assert configuration.num_processes >= 1
    assert configuration.num_machines == (2 if "multinode" in path.stem else 1)


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda path: path.stem)
def test_a_configuration_sets_nothing_that_recipes_own(path: Path):
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert OWNED_BY_RECIPES & {*settings, *settings.get("deepspeed_config", {})} == set()
