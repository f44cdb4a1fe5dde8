import subprocess
import sys

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig

from flame.checkpoint import CheckpointManager, model_tensors, save_run_artifacts
from flame.models.build import build_model
from flame.utils.convert_dcp_to_hf import main as to_hf
from flame.utils.convert_hf_to_dcp import main as to_dcp


def make_run(root):
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = build_model(config).model.to_empty(device="cpu")
    for i, parameter in enumerate(model.parameters()):
        torch.nn.init.constant_(parameter, i)
    save_run_artifacts(root, config)
    CheckpointManager(root / "checkpoint").save(7, model_tensors(model), {})


def test_published_commands(tmp_path, capsys):
    """There and back with the documented flags."""
    run, back = tmp_path / "run with blanks", tmp_path / "back"
    make_run(run)
    assert to_hf(["--path", str(run), "--step", "7", "--config", str(run / "model_config.json"), "--quiet"]) == 0
    assert capsys.readouterr().out.strip() == str(run)
    assert to_dcp(["--model", str(run), "--checkpoint", str(back / "checkpoint" / "step-0")]) == 0
    assert to_hf(["--path", str(back), "--max_shard_size", "4KB"]) == 0
    expected = load_file(run / "model.safetensors")
    found = {}
    for path in back.glob("model-*.safetensors"):
        found |= load_file(path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_user_errors_are_one_readable_message(tmp_path, capsys):
    make_run(tmp_path)
    assert to_hf(["--path", str(tmp_path), "--step", "999"]) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert errors[-1].endswith("steps there are: 7")
    assert to_hf(["--path", str(tmp_path / "nowhere")]) == 2
    assert to_hf(["--path", str(tmp_path), "--max_shard_size", "big"]) == 2
    assert "'big' is no size" in capsys.readouterr().err


def test_help_is_fast_and_needs_no_torch():
    code = "import sys; from flame.utils.convert_dcp_to_hf import main\ntry: main(['-h'])\nexcept SystemExit: pass\n"
    code += "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
