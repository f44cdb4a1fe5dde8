"""The recipes in configs/recipes: each is a job that can start, and trains on the tokens that its name says."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from flame.cli.parse import parse_args
from flame.paths import PACKAGE_ROOT, find_resource

ROOT = PACKAGE_ROOT.parent
RECIPES = sorted(path.stem for path in (ROOT / "configs" / "recipes").glob("*.toml"))
NUM_GPUS = 8  # what the recipes are written for


def load(name: str):
    return parse_args(["--job.config_file", f"configs/recipes/{name}.toml"])


def test_both_scales_and_both_schedules_ship():
    assert {"340M_10B", "340M_15B", "1B_100B"} == {name.rsplit("_", 1)[0] for name in RECIPES}
    assert len(RECIPES) == 6 and all(name.endswith(("_cosine", "_wsd")) for name in RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_the_check_passes(name, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "flame.cli", "--check", "--job.config_file", f"configs/recipes/{name}.toml"],
        cwd=tmp_path,  # shipped files are found from any folder
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", RECIPES)
def test_tokens_and_schedule_are_those_of_the_name(name):
    size, tokens, schedule = name.split("_")
    config = load(name)
    training = config.training
    step_tokens = training.batch_size * training.gradient_accumulation_steps * training.seq_len * NUM_GPUS
    assert step_tokens == 524_288
    expected = float(tokens.removesuffix("B")) * 1e9
    assert training.steps * step_tokens == pytest.approx(expected, rel=0.08)
    assert f"_{size}." in config.model.config and find_resource(config.model.config).is_file()
    assert config.lr_scheduler.decay_ratio == (0.1 if schedule == "wsd" else None)
    assert config.lr_scheduler.decay_type == ("cosine" if schedule == "cosine" else "linear")
