from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from flame.models.backend import REFERENCE_FAMILIES, setup_backend, uninstall
from flame.paths import find_resource

# What a tiny model of the family needs besides fewer and smaller layers.
TINY = {
    "gated_deltanet": {"head_dim": 16},
    "mamba2": {"head_dim": 16, "num_heads": 4},
    "samba": {"attn": {"layers": [1], "num_heads": 2, "window_size": 8}},
}


@pytest.fixture(autouse=True, scope="module")
def reference_backend():
    setup_backend("reference", "cpu")
    yield
    uninstall()


def spread_model(family):
    """Weights so large that the most likely token depends on the whole context."""
    config = json.loads(find_resource(f"configs/debug/{family}.json").read_text())
    config |= {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "num_heads": 2,
        "vocab_size": 64,
        "tie_word_embeddings": False,
    }
    config |= TINY.get(family, {})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)
    return model


@pytest.mark.parametrize("family", REFERENCE_FAMILIES)
def test_generation_reads_the_whole_context(family):
    model = spread_model(family)
    ids = torch.randint(3, 64, (1, 6), generator=torch.Generator().manual_seed(0))
    expected = ids
    with torch.no_grad():
        for _ in range(8):
            logits = model(expected, use_cache=False).logits
            expected = torch.cat([expected, logits[:, -1:].argmax(-1)], dim=1)
    options = dict(max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert model.generate(ids, **options).tolist() == expected.tolist()
    assert len(set(expected[0, 6:].tolist())) > 1

    padded = torch.cat([torch.zeros(1, 3, dtype=torch.int64), ids], dim=1)
    mask = (torch.arange(9) >= 3).long()[None]
    assert model.generate(padded, attention_mask=mask, **options)[0, 3:].tolist() == expected[0].tolist()
