"""Which linear layers compute in float8, what is refused, and that saved weights know nothing of it."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn

from flame.checkpoint.names import model_tensors
from flame.config import Float8
from flame.errors import UserError
from flame.parallel.degrees import Degrees
from flame.parallel.float8 import check_layout, convert_to_float8, without_float8

CPU = torch.device("cpu")
EMULATED = Float8(emulate=True)


class MLP(nn.Module):
    """Calls its last layer, or hands its weight to a fused operator, as FLA's MLPs do."""

    def __init__(self, fuse_swiglu: bool):
        super().__init__()
        self.up_proj, self.down_proj, self.fuse_swiglu = nn.Linear(32, 64), nn.Linear(64, 32), fuse_swiglu

    def forward(self, x: Tensor) -> Tensor:
        if self.fuse_swiglu:
            return nn.functional.linear(self.up_proj(x), self.down_proj.weight, self.down_proj.bias)
        return self.down_proj(self.up_proj(x))


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.odd, self.dt_proj = nn.Linear(32, 32), nn.Linear(32, 20), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.q_proj(x), self.dt_proj.weight) + self.odd(x).sum()


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    block = nn.Sequential(Mixer(), MLP(fuse_swiglu=True), nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 32)))
    return nn.Sequential(nn.Linear(32, 32), block)


def convert(model: nn.Sequential, options: Float8 = EMULATED, degree: int = 1) -> list[str]:
    convert_to_float8([("1", model[1])], options, CPU, degree)
    return [name for name, each in model.named_modules() if type(each).__name__ == "Float8Linear"]


def test_layers_that_fit_and_are_called_are_converted(caplog):
    model = make_model()
    names = list(model.state_dict())
    with caplog.at_level(logging.INFO):
        converted = convert(model)
    assert converted == ["1.0.q_proj", "1.1.up_proj", "1.1.down_proj", "1.2.0", "1.2.1"]
    assert "float8 (tensorwise, emulated): 5 linear layers of the blocks converted, 2 left" in caplog.text
    assert not model[1][1].fuse_swiglu, "the MLP must call its layer"
    assert "fuse_swiglu off in 1 MLPs" in caplog.text
    assert list(model.state_dict()) == names


def test_an_mlp_that_calls_its_layers_anyway_is_as_any_other(caplog):
    model = make_model()
    model[1][1].fuse_swiglu = False
    with caplog.at_level(logging.INFO):
        assert "1.1.down_proj" in convert(model)
    assert "fuse_swiglu" not in caplog.text


def test_an_mlp_whose_layers_do_not_fit_stays_fused():
    model = make_model()
    model[1][1].down_proj = nn.Linear(64, 20)
    assert "1.1.up_proj" in convert(model)
    assert model[1][1].fuse_swiglu


def test_shares_of_a_layer_must_fit_too():
    assert convert(make_model(), degree=2) == ["1.0.q_proj", "1.1.up_proj", "1.1.down_proj"]
    with pytest.raises(UserError, match=r"no linear layer of the blocks .* multiples of 16 on each of 8 ranks"):
        convert(make_model(), degree=8)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_recipes_round(recipe):
    plain, model = make_model(), make_model()
    convert(model, Float8(emulate=True, recipe_name=recipe))
    x = torch.randn(16, 32)
    expected, actual = plain(x), model(x)
    difference = float(((actual - expected).norm() / expected.norm()).detach())
    assert 1e-3 < difference < 0.1
    with without_float8(model):
        torch.testing.assert_close(model(x), expected)
    assert torch.equal(model(x), actual)
    (loss := actual.square().mean()).backward()
    assert loss.isfinite() and all(each.grad is None or each.grad.isfinite().all() for each in model.parameters())


def test_weights_that_are_gathered_in_float8_are_saved_as_plain_ones():
    plain, model = make_model(), make_model()
    convert(model, Float8(emulate=True, enable_fsdp_float8_all_gather=True))
    saved, expected = model_tensors(model), model_tensors(plain)
    assert saved.keys() == expected.keys()
    for name, tensor in saved.items():
        assert type(tensor) is Tensor and tensor.dtype is torch.float32
        assert torch.equal(tensor, expected[name])
    saved["model.1.0.q_proj.weight"].zero_()  # loading writes into what is saved
    assert not model_tensors(model)["model.1.0.q_proj.weight"].any()


def test_a_cpu_is_refused():
    with pytest.raises(UserError, match=r"needs a GPU of compute capability 8.9 or more, this is a CPU; leave it out"):
        convert(make_model(), Float8())


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        (Degrees(), r"the layout \(one device\) shards nothing"),
        (Degrees(replicate=2), r"the layout \(replicate 2\) shards nothing"),
        (Degrees(shard=2, tensor=2), "tensor_parallel_degree = 2 do not go together"),
    ],
)
def test_layouts_that_cannot_gather_in_float8(degrees, message):
    gathers = Float8(enable_fsdp_float8_all_gather=True)
    with pytest.raises(UserError, match=message):
        check_layout(gathers, degrees)
    check_layout(gathers, Degrees(shard=2))
    check_layout(Float8(), degrees)
