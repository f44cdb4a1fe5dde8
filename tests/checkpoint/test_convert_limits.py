"""Conversion at its limits: every family that ships, the memory it takes, what an interruption leaves."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from flame.checkpoint import dcp, writer
from flame.checkpoint.from_hf import convert_hf_to_dcp
from flame.checkpoint.manager import CheckpointManager
from flame.checkpoint.to_hf import convert_dcp_to_hf
from flame.config import Model
from flame.models import load_model_config
from flame.models.backend import setup_backend
from flame.models.custom import load_recorded
from flame.paths import find_resource

from .test_convert import assert_same_bits, read_weights
from .test_manager import die, in_child

FAMILIES = sorted(path.stem for path in find_resource("configs/debug").glob("*.json"))


@pytest.fixture(scope="module", autouse=True)
def backend():
    setup_backend("auto", "cpu")


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back_is_bit_equal_for_every_family(tmp_path, family, tied):
    hf, run = tmp_path / "hf", tmp_path / "run"
    load_recorded({"model": {"custom_models": ["sba"]}} if family == "sba" else {}, tmp_path)
    config = load_model_config(Model(config=str(find_resource(f"configs/debug/{family}.json"))))
    config.update({"vocab_size": 64, "tie_word_embeddings": tied})
    model = AutoModelForCausalLM.from_config(config)
    for number, tensor in enumerate(model.state_dict().values()):
        if tensor.is_floating_point():  # values of its own for each, those included that start at zero or one
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number)))
    model.save_pretrained(hf)
    if family == "sba":
        (hf / "config.toml").write_text('[model]\ncustom_models = ["sba"]\n')
    convert_hf_to_dcp(hf, run / "checkpoint" / "step-0")
    convert_dcp_to_hf(run)
    assert_same_bits(read_weights(hf), read_weights(run))
    assert ("lm_head.weight" in read_weights(run)) is not tied


# Large enough to be seen beside what a process takes anyway: 32 tensors of 8 MB, in two files.
ROWS, COLUMNS, NUM_TENSORS, NUM_FILES = 1024, 2048, 32, 2
SHARD_BYTES = NUM_TENSORS // NUM_FILES * 4 * ROWS * COLUMNS


M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


def peak_growth(function, *args) -> int:
    """Bytes by which the peak memory of a forked process grows while it runs ``function``."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    assert in_child(_measure, sender, function, *args) == 0
    return receiver.recv()


def _measure(sender, function, *args) -> None:
    function(*args)  # what is loaded once, code and caches, is no part of the growth
    # Free blocks go back to the system, now and later: the peak is of what is held, not of the heap's gaps.
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 1 << 20)
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from what is in use now
    before = memory("VmRSS")
    function(*args)
    sender.send(memory("VmHWM") - before)


def memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def read_all(folder):
    assert sum(tensor.sum() for tensor in read_weights(folder).values()) > 0


def fake_outline(monkeypatch, sizes):
    """Tensors without a model: the memory of reading and writing is what counts."""
    from flame.checkpoint import from_hf, to_hf
    from flame.checkpoint.hf_model import ModelOutline

    config = LlamaConfig(vocab_size=8, hidden_size=8, num_attention_heads=2)
    outline = ModelOutline(config=config, architecture="LlamaForCausalLM", sizes=sizes, tied={}, ignored=[])
    for module in (from_hf, to_hf):
        monkeypatch.setattr(module, "outline", lambda *_: outline)
        monkeypatch.setattr(module, "load_config", lambda *_: config)


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA does not outlive a fork")
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_memory_stays_below_a_shard_and_a_third(tmp_path, monkeypatch):
    names = [f"w{number:02}" for number in range(NUM_TENSORS)]
    fake_outline(monkeypatch, {f"model.{name}": torch.Size([ROWS, COLUMNS]) for name in names})
    hf, run = tmp_path / "hf", tmp_path / "run"
    hf.mkdir()
    (hf / "config.json").write_text('{"vocab_size": 8}')
    files = {
        name: f"model-{1 + number * NUM_FILES // NUM_TENSORS:05}-of-00002.safetensors"
        for number, name in enumerate(names)
    }
    for file in sorted(set(files.values())):
        save_file({name: torch.rand(ROWS, COLUMNS) for name in names if files[name] == file}, hf / file)
    (hf / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    monkeypatch.setattr(writer, "write_tensors", partial(dcp.write_tensors, file_bytes=SHARD_BYTES))

    there = peak_growth(convert_hf_to_dcp, hf, run / "checkpoint" / "step-0")
    back = peak_growth(lambda: convert_dcp_to_hf(run, max_shard_size=SHARD_BYTES))
    assert there < 1.3 * SHARD_BYTES, f"{there / SHARD_BYTES:.2f} of a shard"
    assert back < 1.3 * SHARD_BYTES, f"{back / SHARD_BYTES:.2f} of a shard"
    assert peak_growth(read_all, hf) > 1.9 * SHARD_BYTES, "the measure sees what is held at once"


def test_an_optimizer_is_not_read(tmp_path, monkeypatch):
    fake_outline(monkeypatch, {"model.w": torch.Size([4])})
    (tmp_path / "model_config.json").write_text("{}")
    tensors = {"model.w": torch.ones(4), "optimizer.w.exp_avg": torch.ones(4)}
    CheckpointManager(tmp_path / "checkpoint").save(1, tensors, {"step": 1})
    read, seen = dcp.read_tensors, []
    monkeypatch.setattr("flame.checkpoint.to_hf.read_tensors", lambda *a, **k: seen.extend(a[1]) or read(*a, **k))
    convert_dcp_to_hf(tmp_path)
    assert seen == ["model.w"]


def convert_and_die(hf, step):
    setup_backend("auto", "cpu")
    writer.write_manifest = die
    convert_hf_to_dcp(hf, step)


def test_an_interrupted_conversion_to_a_checkpoint_leaves_the_old_one(tmp_path):
    hf, step = tmp_path / "hf", tmp_path / "run" / "checkpoint" / "step-0"
    config = LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(hf)
    convert_hf_to_dcp(hf, step)
    before = {path.name: path.read_bytes() for path in step.iterdir()}
    torch.nn.init.ones_(model.lm_head.weight)
    model.save_pretrained(hf)
    assert in_child(convert_and_die, hf, step) == -signal.SIGKILL
    assert {path.name: path.read_bytes() for path in step.iterdir()} == before
    convert_dcp_to_hf(tmp_path / "run")
    with safe_open(tmp_path / "run" / "model.safetensors", framework="pt") as file:
        assert not (file.get_tensor("lm_head.weight") == 1).all()
