"""Linear layers that add up the gradients of a shared input: the same numbers, without sums of their own."""

from __future__ import annotations

import copy
import gc
import inspect
import json
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from flame.config import ActivationCheckpoint
from flame.models import build_model, find_blocks, init_weights
from flame.models.backend import setup_backend, uninstall
from flame.models.loss import attach_training_forward
from flame.parallel.recompute import recompute_blocks
from flame.parallel.residual_norms import add_residual_gradients
from flame.parallel.shared_inputs import GATES, can_share, find_gates, missing_rows, share_input_gradients
from flame.paths import find_resource
from tests.parallel.calls import Calls

WIDTH = 16
LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


class Block(nn.Module):
    """Queries, keys and a gate of low rank read one tensor, another layer the block's own input."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.o = (nn.Linear(WIDTH, WIDTH, bias=bias) for bias in (True, False, True))
        self.gate = nn.Sequential(nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH))
        self.skip = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x * self.skip(x) + self.o(torch.tanh(self.q(y)) * self.k(y) + self.gate(y))


def make_models(block=Block, dtype: torch.dtype = torch.float64) -> tuple[nn.Sequential, nn.Sequential]:
    """A model as it is, and the same whose blocks share."""
    torch.manual_seed(0)
    plain = nn.Sequential(block(), block()).to(dtype)
    shared = copy.deepcopy(plain)
    share_input_gradients(shared.named_children())
    assert [name for name, _ in plain.named_parameters()] == [name for name, _ in shared.named_parameters()]
    return plain, shared


def numbers(model: nn.Module, x: Tensor) -> list[Tensor]:
    """What the model gives, and all gradients."""
    y, trained = model(x), [each for each in model.parameters() if each.requires_grad]
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *trained], materialize_grads=True)]


def assert_same(plain: list[Tensor], shared: list[Tensor]) -> None:
    torch.testing.assert_close(shared, plain, rtol=1e-12, atol=1e-12)  # float64, summed up in another order


@pytest.mark.parametrize("shape", [(2, 5, WIDTH), (7, WIDTH), (WIDTH,)])
def test_numbers_are_the_same(shape):
    plain, shared = make_models()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    for _ in range(2):
        assert torch.equal(plain(x), shared(x))
        assert_same(numbers(plain, x), numbers(shared, x))


def test_gradients_are_added_by_the_products():
    counts = []
    for model in make_models():
        x = torch.randn(2, 5, WIDTH, dtype=torch.float64, requires_grad=True)
        loss = model(x).sum()
        with Calls() as calls:
            loss.backward()
        counts.append([calls.names.count(name) for name in ("aten::add.Tensor", "aten::add_.Tensor", "aten::addmm_")])
    (plain_adds, plain_in_place, none), (adds, in_place, products) = counts
    assert (none, products) == (0, 2 * 2)
    assert plain_adds + plain_in_place - adds - in_place == 2 * 2


def test_bfloat16_is_as_near_to_the_truth():
    plain, shared = make_models(dtype=torch.bfloat16)
    exact = copy.deepcopy(plain).double()
    distances = torch.zeros(2, 1 + 1 + len(list(plain.parameters())))
    for _ in range(10):
        x = torch.randn(256, WIDTH, dtype=torch.bfloat16)
        truth = numbers(exact, x.double().requires_grad_())
        for row, model in enumerate((plain, shared)):
            found = numbers(model, x.detach().requires_grad_())
            pairs = zip(found, truth, strict=True)
            distances[row] += torch.tensor([(a.double() - b).norm() / b.norm() for a, b in pairs])
    # Ten inputs leave 1.1 to chance; a gradient that is lost or added twice is ten times as far.
    assert (distances[1] <= 1.3 * distances[0]).all()


@pytest.mark.parametrize(("width", "dtype", "expected"), [(6, "bfloat16", 2), (8, "bfloat16", 0), (63, "float16", 1)])
def test_layers_narrow_enough_to_be_padded(width, dtype, expected):
    assert missing_rows(torch.empty(width, 4, dtype=getattr(torch, dtype))) == expected
    assert missing_rows(torch.empty(width, 4)) == missing_rows(torch.empty(width + 64, 4).bfloat16()) == 0


@pytest.fixture
def gates(monkeypatch):
    """The test's own blocks have gates like FLA's layers."""
    for block in (Gates, Apart):
        monkeypatch.setitem(GATES, block.__name__, ("b_proj", "a_proj"))


class Gates(nn.Module):
    """Gates of a few heads, one of them with a bias, and a wide layer read one tensor."""

    def __init__(self):
        super().__init__()
        self.b_proj, self.a_proj = nn.Linear(WIDTH, 6, bias=False), nn.Linear(WIDTH, 3, bias=False)
        self.gate, self.wide = nn.Linear(WIDTH, 5), nn.Linear(WIDTH, 80)

    def forward(self, x: Tensor) -> Tensor:
        b, gate, a = self.b_proj(x), self.gate(x), self.a_proj(x)
        assert all(each.is_contiguous() for each in (a, b, gate))
        return a.sum(-1) * b.square().sum(-1) + self.wide(x).sum(-1) * gate.sum(-1)


def differentiate(block: nn.Module, x: Tensor) -> list[Tensor]:
    """The output, and gradients of the input and the weights."""
    x = x.clone().requires_grad_()
    y = block(x)
    return [y, *torch.autograd.grad(y.float().square().sum(), [x, *block.parameters()], allow_unused=True)]


def test_narrow_layers_give_the_same_numbers(gates):
    """Half precision sums up to 16 products in float32 here, however many zeros and rows stand beside."""
    torch.manual_seed(0)
    plain = Gates().bfloat16()
    sharing = copy.deepcopy(plain)
    share_input_gradients([("", sharing)])
    x = torch.randn(2, 5, WIDTH, dtype=torch.bfloat16)
    (y, *gradients), (right_y, *right) = differentiate(sharing, x), differentiate(plain, x)
    assert torch.equal(y, right_y)
    for a, b in zip(gradients, right, strict=True):
        assert a.shape == b.shape
        assert (a - b).float().norm() <= 2**-7 * b.float().norm()  # the input's is rounded once less a layer


@pytest.mark.parametrize(("dtype", "num_products"), [(torch.bfloat16, 3), (torch.float32, 4)])
def test_two_gates_are_one_product_in_half_precision(gates, dtype, num_products):
    block = Gates().to(dtype)
    share_input_gradients([("", block)])
    with Calls() as calls:
        block(torch.randn(7, WIDTH, dtype=dtype).requires_grad_())
    assert sum(name in ("aten::mm", "aten::addmm") for name in calls.names) == num_products


def test_flas_gates_are_found():
    path = find_resource("configs/debug/gated_deltanet.json")
    setup_backend("reference", "cpu")
    try:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**json.loads(path.read_text())))
        mixer = model.model.layers[0].attn
        assert find_gates(model.model.layers[0]) == {mixer.b_proj: mixer.a_proj}
    finally:
        uninstall()


class Apart(Gates):
    """The second gate reads something else, or computes alone, or both within a checkpoint of their own."""

    def forward(self, x: Tensor) -> Tensor:
        h = x * 2
        y = self.b_proj(h).sum(-1) * self.a_proj(x).sum(-1)
        y = y + self.a_proj(h).sum(-1) + self.b_proj(h).sum(-1)
        return y + self.a_proj(x).sum(-1) + checkpoint(self.both, x, use_reentrant=False)

    def both(self, x: Tensor) -> Tensor:
        return self.b_proj(x).sum(-1) * self.a_proj(x).sum(-1)


def test_gates_that_do_not_come_in_pairs(gates):
    torch.manual_seed(0)
    plain = Apart().bfloat16()
    sharing = copy.deepcopy(plain)
    share_input_gradients([("", sharing)])
    x = torch.randn(4, WIDTH, dtype=torch.bfloat16)
    for found, right in zip(differentiate(sharing, x)[:4], differentiate(plain, x)[:4], strict=True):
        assert (found - right).float().norm() <= 2**-6 * right.float().norm()


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_blocks_can_be_computed_again(mode):
    plain, shared = make_models()
    recompute_blocks(shared.named_children(), ActivationCheckpoint(mode=mode, selective_ac_option="op"))
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64, requires_grad=True)
    assert_same(numbers(plain, x), numbers(shared, x))


class Odd(Block):
    """A layer that runs twice, one whose output is lost, an input without a gradient, one that is written to."""

    def __init__(self):
        super().__init__()
        self.o.requires_grad_(False)  # so that it need not keep what is written to

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        z = self.q(y).tanh() * self.k(y.detach())
        self.k(y)
        with torch.no_grad():
            z = z + self.k(y)
        z = z + self.q(y)
        y = self.norm(x)
        z = z + self.o(y)
        y *= 2.0
        return z + self.o(y) + x * self.skip(x)


def test_odd_uses_of_an_input():
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64, requires_grad=True)
    plain, shared = make_models(Odd)
    assert_same(numbers(plain, x), numbers(shared, x))


def test_gradients_of_gradients():
    plain, shared = make_models()
    x = torch.randn(3, 5, WIDTH, dtype=torch.float64, requires_grad=True)

    def second(model: nn.Module) -> list[Tensor]:
        (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return list(torch.autograd.grad(first.square().sum(), [x, *model.parameters()], materialize_grads=True))

    assert_same(second(plain), second(shared))


class InPlace(Block):
    """Writes to what a layer with a bias gave."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x * self.skip(x) + self.q(y).mul_(2.0) + self.k(y).relu_()


class Words(Block):
    """Calls its layers as torch's may be called."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x * self.skip(input=x) + self.q(input=y) + self.k(y)


class Replaces(Block):
    """Has a layer with a forward of its own."""

    def __init__(self):
        super().__init__()
        self.q.forward = lambda x: x * self.q.weight[0]


class Recurses(Block):
    """Calls itself."""

    depth = 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        if self.depth == 0:
            self.depth = 1
            y = y + self(self.k(y))
            self.depth = 0
        return super().forward(self.q(y))


class Checkpoints(Block):
    """Computes a part of itself again."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        z = checkpoint(lambda y: self.q(y).tanh() * self.k(y), y, use_reentrant=False)
        return x * self.skip(x) + z + self.k(y)


class Nothing(Block):
    """Has a layer that got no token."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return super().forward(x) + self.q(y[:, :0]).sum() + self.k(y[:, :0]).sum()


class Casts(Block):
    """Computes a part of itself in another dtype."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x.float()).to(x.dtype)
        with torch.autocast("cpu", torch.bfloat16):
            z = self.q(y) + self.k(y)
        return x * self.skip(x) + z.to(x.dtype)


@pytest.mark.parametrize("block", [InPlace, Checkpoints, Words, Recurses])
@pytest.mark.parametrize("of_rows", [False, True])
def test_odd_blocks(block, of_rows):
    plain, shared = make_models(block)
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64)[0 if of_rows else slice(None)].requires_grad_()
    assert_same(numbers(plain, x), numbers(shared, x))


def test_a_forward_of_a_layers_own_stays():
    block = Replaces()
    own = block.q.forward
    share_input_gradients([("block", block)])
    assert block.q.forward is own


def test_signatures_stay():
    block = Block()
    before = inspect.signature(block.forward)
    share_input_gradients([("block", block)])
    assert inspect.signature(block.forward) == before


def test_blocks_of_users_are_left_alone():
    llama = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA))
    assert all(can_share(block) for _, block in find_blocks(llama))
    assert not can_share(Block())


def test_layers_without_tokens():
    plain, shared = make_models(Nothing)
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64, requires_grad=True)
    assert_same(numbers(plain, x), numbers(shared, x))


def test_autocast():
    plain, shared = make_models(Casts, torch.float32)
    x = torch.randn(2, 5, WIDTH, requires_grad=True)
    for a, b in zip(numbers(plain, x), numbers(shared, x), strict=True):
        torch.testing.assert_close(a, b)


def test_a_backward_may_be_repeated():
    plain, shared = make_models()
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64, requires_grad=True)
    y = shared(x).square().sum()
    expected = torch.autograd.grad(plain(x).square().sum(), x)
    for _ in range(2):
        assert_same(list(expected), list(torch.autograd.grad(y, x, retain_graph=True)))


def test_nothing_is_kept_when_a_block_is_through():
    _, shared = make_models()
    inputs: list[weakref.ref] = []
    shared[0].norm.register_forward_hook(lambda _module, _args, output: inputs.append(weakref.ref(output)))
    x = torch.randn(2, WIDTH, dtype=torch.float64, requires_grad=True)
    gc.disable()  # by reference counts alone
    try:
        shared(x).sum().backward()
        shared[0].skip.forward = None
        with pytest.raises(TypeError):
            shared(x)
        assert [each() for each in inputs] == [None, None]
    finally:
        gc.enable()


FAMILIES = sorted(path.stem for path in find_resource("configs/debug").glob("*.json") if path.stem != "sba")


@pytest.mark.parametrize("recompute_norms", [False, True])
@pytest.mark.parametrize("family", [*FAMILIES, "llama"])
def test_gradients_of_every_family(family, recompute_norms):
    def gradients(share: bool) -> dict[str, Tensor]:
        values = LLAMA if family == "llama" else json.loads(find_resource(f"configs/debug/{family}.json").read_text())
        built = build_model(AutoConfig.for_model(**(values | {"vocab_size": 64})))
        model = built.model
        attach_training_forward(model)
        model.to_empty(device="cpu")
        init_weights(model, built.recipe, 0, built.tied)
        if share:
            add_residual_gradients(find_blocks(model))
            share_input_gradients(find_blocks(model), recompute_norms=recompute_norms)
        ids = torch.randint(0, 64, (1, 48), generator=torch.Generator().manual_seed(0))
        bounds = torch.tensor([0, 20, 48], dtype=torch.int32)
        loss = model.double().train()(ids, labels=ids.roll(-1, 1), cu_seqlens=bounds)
        with Calls() as calls:
            loss.backward()
        one_projection = family in ("mamba", "mamba2")  # and no MLP
        assert ("aten::addmm_" in calls.names) == (share and not one_projection)
        return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}

    setup_backend("reference", "cpu")
    try:
        plain, shared = gradients(False), gradients(True)
    finally:
        uninstall()
    assert plain.keys() == shared.keys()
    for name, expected in plain.items():
        largest = float(expected.abs().max())
        torch.testing.assert_close(shared[name], expected, rtol=1e-6, atol=1e-6 * largest, msg=name)
