"""Every debug model through the trainer: it learns, resumes bit for bit, and its export is what was trained."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from flame.checkpoint.manager import CheckpointManager
from flame.checkpoint.names import model_tensors
from flame.models.backend import setup_backend, uninstall
from flame.models.build import build_model
from flame.models.init import init_weights
from flame.models.model_config import load_model_config
from flame.paths import find_resource
from tests.runs.harness import Job, run_jobs

FAMILIES = sorted(path.stem for path in find_resource("configs/debug").glob("*.json"))
STEPS, HALF = 8, 4


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, tuple[Job, Job]]:
    """Each family as (an undisturbed run that exports, a run that stopped half way and went on)."""
    folder = tmp_path_factory.mktemp("families")
    table, jobs = {}, []
    for family in FAMILIES:
        options = {"model.config": f"configs/debug/{family}.json", "training.steps": str(STEPS)}
        whole = Job(folder / family, options | {"checkpoint.export_hf": "true"})
        first = Job(folder / f"{family}_parts", options | {"training.steps": str(HALF)})
        parts = Job(folder / f"{family}_parts", options)
        table[family] = (whole, parts)
        jobs += [whole, first, parts]
    codes = run_jobs(jobs)
    assert {job.folder.name for job, code in zip(jobs, codes, strict=True) if code != 0} == set()
    return table


@pytest.fixture(autouse=True, scope="module")
def reference_backend():
    setup_backend("reference", "cpu")
    yield
    uninstall()


@pytest.mark.parametrize("family", FAMILIES)
def test_training_lowers_the_loss(runs, family):
    losses = runs[family][0].series("loss")
    assert len(losses) == STEPS and all(math.isfinite(loss) for loss in losses)
    assert losses[0] == pytest.approx(math.log(4096), abs=0.2), "an untrained model knows nothing"
    assert sum(losses[-2:]) < sum(losses[:2])


@pytest.mark.parametrize("family", FAMILIES)
def test_resume_is_bit_exact(runs, family):
    whole, parts = runs[family]
    for key in ("step", "loss", "grad_norm"):
        assert parts.series(key) == whole.series(key), key


@pytest.mark.parametrize("family", FAMILIES)
def test_the_reloaded_export_gives_the_trainers_logits(runs, family):
    folder = runs[family][0].folder
    trained = build_trained(folder).eval()
    reloaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.randint(4096, (1, 150), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(trained(ids, use_cache=False).logits, reloaded(ids, use_cache=False).logits)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    generation = json.loads((folder / "generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"]) == (tokenizer.bos_token_id, tokenizer.eos_token_id)


def build_trained(folder):
    """The model as the trainer builds it, with the weights of the run's last checkpoint."""
    path = str(folder / "model_config.json")
    built = build_model(load_model_config(SimpleNamespace(config=path, norm_type="", trust_remote_code=False)))
    built.model.to_empty(device="cpu")
    init_weights(built.model, built.recipe, 0, built.tied)
    CheckpointManager(folder / "checkpoint").load(STEPS, model_tensors(built.model))
    return built.model
