"""Every debug model through everything that a family must do on a CPU; one process for all of them.

    python -m tests.runs.family_worker --output cpu.json [--families gla,mamba]

The output is rewritten after each family, in the layout of docs/families.json. ``test_families`` runs this.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from flame.checkpoint.manager import CheckpointManager
from flame.checkpoint.names import model_tensors
from flame.errors import UserError
from flame.launch.exit_codes import OK, USER_ERROR
from flame.launch.layout import free_port
from flame.models.backend import setup_backend
from flame.models.build import BuiltModel, build_model
from flame.models.init import init_weights, named_tensors
from flame.models.loss import attach_training_forward
from flame.models.model_config import load_model_config
from flame.models.proofs import no_weight_zero
from flame.paths import find_resource
from tests.runs.harness import Job
from tests.runs.worker import run
from utils.family_table import save

FAMILIES = sorted(path.stem for path in find_resource("configs/debug").glob("*.json"))
STEPS, HALF = 6, 3
VOCAB_SIZE = 4096
# Steps large enough for six of them to show in the loss.
LEARNING = {"training.seq_len": "128", "training.context_len": "96", "optimizer.lr": "1e-2"}


class NotLike(AssertionError):
    """Two things that must be equal are not."""


def train(family: str, folder: Path, part: str, **options: str) -> Job:
    """Run one job in this process; raises UserError when it is refused."""
    base = {"model.config": f"configs/debug/{family}.json", "training.steps": str(STEPS)}
    job = Job(folder / part, base | LEARNING | options)
    (code,) = run([(job.argv, job.fault, free_port())], rank=0, world_size=1)
    if code == USER_ERROR:
        raise UserError("the job is refused; the log says why")
    check(code == OK, f"exit code {code}")
    return job


def cpu_train(family: str, folder: Path) -> None:
    """An untrained model knows nothing, and learns from the first steps on."""
    losses = train(family, folder, "whole", **{"checkpoint.export_hf": "true"}).series("loss")
    check(len(losses) == STEPS and all(map(math.isfinite, losses)), f"losses {losses}")
    check(abs(losses[0] - math.log(VOCAB_SIZE)) < 0.2, f"the first loss is {losses[0]:.3f}, not ln {VOCAB_SIZE}")
    check(sum(losses[-2:]) < sum(losses[:2]) - 0.1, f"the loss does not fall: {losses}")


def resume(family: str, folder: Path) -> None:
    """Stopped half way and gone on, a run has the numbers of the undisturbed one, bit for bit."""
    whole = Job(folder / "whole")
    train(family, folder, "parts", **{"training.steps": str(HALF)})
    parts = train(family, folder, "parts")
    for key in ("step", "loss", "grad_norm"):
        check(parts.series(key) == whole.series(key), f"{key} {parts.series(key)}, was {whole.series(key)}")


def varlen(family: str, folder: Path) -> None:
    """Other tokens in one packed document leave states and gradients of the others bit-equal."""
    model = attach_training_forward(materialise(build(family), seed=1)).train()
    bounds = [0, 1, 38, 105, 130]
    changed = slice(bounds[2], bounds[3])
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    ids = torch.randint(VOCAB_SIZE, (1, bounds[-1]), generator=torch.Generator().manual_seed(0))
    others = ids.clone()
    others[:, changed] = (ids[:, changed] + 7) % VOCAB_SIZE
    outside = torch.ones(bounds[-1], dtype=torch.bool)
    outside[changed] = False
    labels = ids.roll(-1, 1).masked_fill(~outside, -100)
    with no_weight_zero(model):
        one, other = (run_packed(model, row, labels, cu_seqlens) for row in (ids, others))
    for what, first, second in zip(("states", "input gradients"), one, other, strict=True):
        check(torch.equal(first[:, outside], second[:, outside]), f"{what} of other documents move")
    check(not torch.equal(one[0][:, changed], other[0][:, changed]), "states do not depend on the tokens")
    # The l2warp penalty is on the logits of every token, target or not.
    has_penalty = getattr(model.config, "use_l2warp", False)
    check(has_penalty or not one[1][:, changed].any(), "a document without targets has a gradient")


def run_packed(model: nn.Module, ids, labels, cu_seqlens) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states [1, T, D] of a packed row, and the loss's gradient by the embeddings [1, T, D]."""
    states, inputs = [], []

    def keep_input(_module, _args, output):
        output.requires_grad_().retain_grad()
        inputs.append(output)

    hooks = [
        model.get_decoder().register_forward_hook(lambda _module, _args, output: states.append(output[0])),
        model.get_input_embeddings().register_forward_hook(keep_input),
    ]
    try:
        model(ids, labels=labels, cu_seqlens=cu_seqlens).backward()
    finally:
        for hook in hooks:
            hook.remove()
    return states[0].detach(), inputs[0].grad


def init(family: str, folder: Path) -> None:
    """Meta, then memory full of NaN, then initial weights: all are set, as a plain build sets them."""
    built = build(family)
    got = tensors_of(materialise(built, seed=0))
    torch.manual_seed(0)
    plain = tensors_of(AutoModelForCausalLM.from_config(built.model.config, dtype=torch.float32))
    check(got.keys() == plain.keys(), f"other tensors: {got.keys() ^ plain.keys()}")
    for name, tensor in got.items():
        expected = plain[name]
        check(bool(torch.isfinite(tensor).all()), f"{name} is left unset")
        check((tensor.shape, tensor.dtype) == (expected.shape, expected.dtype), f"{name} has another shape or dtype")
        if not tensor.is_floating_point() or expected.numel() < 2 or expected.std() == 0:
            check(tensor.numel() < 2 or torch.equal(tensor, expected), f"{name} has other values")
        elif tensor.numel() >= 4096:
            check(abs(tensor.std() / expected.std() - 1) < 0.05, f"{name} has another spread")
            check(abs(tensor.mean() - expected.mean()) < 0.1 * expected.std(), f"{name} has another mean")


def export(family: str, folder: Path) -> None:
    """The exported folder, reloaded, gives the trainer's logits bit for bit, and knows the tokenizer's ids."""
    whole = folder / "whole"
    trained = materialise(build(str(whole / "model_config.json")), seed=0)
    CheckpointManager(whole / "checkpoint").load(STEPS, model_tensors(trained))
    ids = torch.randint(VOCAB_SIZE, (1, 150), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, got = (model.eval()(ids, use_cache=False).logits for model in (trained, reload(folder)))
    check(torch.equal(expected, got), f"logits differ by {(expected - got).abs().max():.1e}")
    tokenizer = AutoTokenizer.from_pretrained(whole)
    generation = json.loads((whole / "generation_config.json").read_text())
    for key in ("bos_token_id", "eos_token_id"):
        check(generation[key] == getattr(tokenizer, key), f"generation_config.{key} is {generation[key]}")


@torch.no_grad()
def decode(family: str, folder: Path) -> None:
    """Token by token, from a prompt on, the reloaded model gives the logits of the full forward."""
    model, length, prompt = reload(folder).eval(), 40, 17
    for parameter in model.parameters():  # away from the start, where all tokens are about as likely
        parameter.mul_(1.5)
    ids = torch.randint(VOCAB_SIZE, (1, length), generator=torch.Generator().manual_seed(0))
    full = model(ids, use_cache=False).logits
    out = model(ids[:, :prompt], use_cache=True)
    logits = [out.logits]
    for position in range(prompt, length):
        out = model(ids[:, position : position + 1], past_key_values=out.past_key_values, use_cache=True)
        logits.append(out.logits[:, -1:])
    difference = (torch.cat(logits, 1) - full).abs().max().item() / full.std().item()
    check(difference < 1e-3, f"logits differ by {difference:.1e} of their spread")
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = ids
    for _ in range(5):
        step = model(expected, use_cache=False).logits[:, -1:].argmax(-1)
        expected = torch.cat([expected, step], 1)
    check(model.generate(ids, **options).tolist() == expected.tolist(), "generate() gives other tokens")


# In this order: later cells look at what earlier ones left.
CELLS: dict[str, Callable[[str, Path], None]] = {
    "init": init,
    "varlen": varlen,
    "cpu_train": cpu_train,
    "resume": resume,
    "export": export,
    "decode": decode,
}


def build(name: str) -> BuiltModel:
    path = name if name.endswith(".json") else f"configs/debug/{name}.json"
    return build_model(load_model_config(SimpleNamespace(config=path, norm_type="", trust_remote_code=False)))


def materialise(built: BuiltModel, seed: int) -> nn.Module:
    """The built model with memory that was full of NaN and is initialised."""
    model = built.model
    model.to_empty(device="cpu")
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.detach().fill_(float("nan") if tensor.is_floating_point() else 77)
    init_weights(model, built.recipe, seed, built.tied)
    return model


@functools.cache
def reload(folder: Path) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder / "whole")


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in named_tensors(model)}


def check(condition: bool, message: str) -> None:
    if not condition:
        raise NotLike(message)


def result_of(cell: str, family: str, folder: Path) -> dict[str, str]:
    """One cell of the table."""
    setup_backend("auto", "cpu")
    try:
        CELLS[cell](family, folder)
    except (UserError, NotImplementedError) as fault:  # the second is how FLA's own classes say what they cannot do
        return {"state": "refused", "why": str(fault).splitlines()[0]}
    except Exception as fault:
        traceback.print_exc()
        return {"state": "failed", "why": f"{type(fault).__name__}: {fault}".splitlines()[0][:300]}
    return {"state": "passed"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--families", default=",".join(FAMILIES), help="debug models, comma-separated")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cpu: dict[str, dict] = {}
    for family in options.families.split(","):
        with tempfile.TemporaryDirectory() as scratch:
            cpu[family] = {cell: result_of(cell, family, Path(scratch)) for cell in CELLS}
            reload.cache_clear()
        save(options.output, {"cpu": cpu, "gpu": {}})
        print(family, json.dumps(cpu[family]), file=sys.stderr, flush=True)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
