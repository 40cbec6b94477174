"""Packed experts and routers: the function of transformers' own modules, and for a row the same bits in any batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from pagedcore.models.linears.packed_experts import PackedExperts, RouterWeight, pack_experts
from pagedcore.models.linears.packed_linear import FASTEST, PackedLinear
from support.doubles import raising
from support.families import tiny_model

DTYPES = [torch.float32, torch.bfloat16]
TOP_K = 3


def experts_of(family: str, dtype: torch.dtype) -> Any:
    """The first experts module of a model of this architecture, with six experts."""
    number = {"gpt_oss": "num_local_experts"}.get(family, "num_experts")
    modules = tiny_model(family, dtype=dtype, **{number: 6}).modules()
    return next(module for module in modules if type(module).__name__.endswith("Experts"))


def routed(num_rows: int, dtype: torch.dtype, num_experts: int = 6, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Rows, the experts of each in an order of their own, and their weights."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(num_rows, num_experts, generator=generator).topk(TOP_K, sorted=False).indices
    weights = torch.rand(num_rows, TOP_K, generator=generator)
    return torch.randn(num_rows, 64, generator=generator).to(dtype), chosen, weights.to(dtype)


@pytest.fixture(params=[(family, dtype) for family in ("qwen3_moe", "gpt_oss") for dtype in DTYPES], ids=str)
def both(request: pytest.FixtureRequest) -> tuple[Any, PackedExperts]:
    """An experts module with its own loop over experts, and the same one packed."""
    original = experts_of(*request.param)
    original.config._experts_implementation = "eager"
    return original, PackedExperts(copy.deepcopy(original), FASTEST, lambda weight: None)


@torch.inference_mode()
def test_packed_experts_compute_what_transformers_computes(both: tuple[Any, PackedExperts]) -> None:
    """Concatenated and interleaved, transposed and with biases: the same function up to rounding."""
    original, packed = both
    inputs = routed(40, original.down_proj.dtype)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.03}[inputs[0].dtype]
    expected = original(*inputs).float()
    torch.testing.assert_close(packed(*inputs).float(), expected, rtol=0, atol=tolerance * expected.abs().max().item())


@torch.inference_mode()
def test_a_row_has_the_same_bits_in_any_company(both: tuple[Any, PackedExperts]) -> None:
    """Alone, in groups of every size and in another order, a row's sum has the bytes it has among all rows."""
    original, packed = both
    inputs = routed(70, original.down_proj.dtype)
    expected = packed(*inputs)
    for size in (1, 2, 3, 7, 33):
        parts = zip(*(tensor.split(size) for tensor in inputs), strict=True)
        assert torch.equal(torch.cat([packed(*part) for part in parts]), expected), f"{size} rows at a time"
    assert torch.equal(packed(*(tensor.flip(0) for tensor in inputs)), expected.flip(0))


@torch.inference_mode()
def test_a_sum_has_the_order_of_its_own_row() -> None:
    """The outputs of a row's experts are added one by one, in float32, as the router names them."""
    packed = PackedExperts(experts_of("qwen3_moe", torch.float32), FASTEST, lambda weight: None)
    rows, chosen, weights = routed(8, torch.float32)
    parts = [packed(rows, chosen[:, [i]], weights[:, [i]]) for i in range(TOP_K)]
    assert torch.equal(packed(rows, chosen, weights), (parts[0] + parts[1]) + parts[2])
    assert not torch.equal(packed(rows, chosen, weights), (parts[2] + parts[1]) + parts[0])


@pytest.mark.parametrize("width", [40, 200])
@torch.inference_mode()
def test_activations_of_odd_widths_have_the_same_bits_in_any_company(width: int) -> None:
    """Torch computes the last elements of a tensor in another way than the others: no row of a step is among them."""
    experts = experts_of("qwen3_moe", torch.float32)
    experts.gate_up_proj = nn.Parameter(torch.randn(6, 2 * width, 64))
    experts.down_proj = nn.Parameter(torch.randn(6, 64, width))
    experts._apply_gate = lambda gate_up: nn.functional.silu(gate_up[:, :width].contiguous()) * gate_up[:, width:]
    packed = PackedExperts(experts, FASTEST, lambda weight: None)
    inputs = routed(100, torch.float32)
    alone = zip(*(tensor.split(1) for tensor in inputs), strict=True)
    assert torch.equal(packed(*inputs), torch.cat([packed(*row) for row in alone]))


@torch.inference_mode()
def test_an_expert_costs_two_products_and_one_without_rows_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of products follows from the experts that were chosen, and no product has fewer than two rows."""
    packed = PackedExperts(experts_of("qwen3_moe", torch.float32), FASTEST, lambda weight: None)
    sizes: list[int] = []
    for product in (*packed.gate_up, *packed.down):
        multiply = product.multiply
        product.multiply = lambda rows, multiply=multiply: (sizes.append(len(rows)), multiply(rows))[1]
    packed(torch.randn(5, 64), torch.tensor([[0, 4], [0, 4], [4, 0], [0, 4], [0, 5]]), torch.rand(5, 2))
    assert sizes == [5, 4, 2] * 2


def test_weights_are_not_held_twice() -> None:
    """Every weight of experts and routers is reported as unused, and as many elements are packed."""
    model = tiny_model("qwen3_moe")
    names = [name for name, _ in model.named_parameters() if ".experts." in name or name.endswith("mlp.gate.weight")]
    before = sum(model.get_parameter(name).numel() for name in names)
    unused: list[int] = []
    note = lambda weight: unused.append(weight.numel())  # noqa: E731
    products = pack_experts(model, linears=FASTEST, routers=FASTEST, on_unused=note)
    assert len(names) == len(unused) == 9
    assert sum(unused) == before
    assert not set(names) & {name for name, _ in model.named_parameters()}
    # Why not equal: routers of four experts are filled up to a panel.
    assert sum(product.weight.numel() for product in products if product.out_features > 4) == before - 3 * 4 * 64


@torch.inference_mode()
def test_a_routers_logits_do_not_depend_on_the_number_of_rows() -> None:
    """Converted or not, ``F.linear`` with a router's weight is one packed product in float32, its bias included."""
    for dtype in DTYPES:
        matrix, bias, rows = torch.randn(5, 64).to(dtype), torch.randn(5).to(dtype), torch.randn(50, 64).to(dtype)
        weight: Any = RouterWeight(matrix, bias, FASTEST)
        logits = nn.functional.linear(rows, weight, bias)
        assert logits.dtype == weight.dtype == dtype
        torch.testing.assert_close(logits, nn.functional.linear(rows, matrix, bias), rtol=0, atol=0.2)
        wide = nn.functional.linear(rows.float(), weight.type(torch.float32))
        assert torch.equal(weight.float().to(torch.float32).product(rows.float()), wide)
        for row in range(50):
            alone = nn.functional.linear(rows[row : row + 1].float(), weight)
            assert torch.equal(alone.sigmoid(), wide.sigmoid()[row : row + 1])


def test_a_router_that_multiplies_in_another_way_keeps_its_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes the place of a matrix raises ``TypeError`` for any other function; such a router gets its own back.
    One that could not be tried for lack of memory is no such router, and the model is refused.
    """

    class OtherRouter(nn.Linear):
        """Multiplies by an operator."""

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return torch.matmul(rows, self.weight)

    weight: Any = RouterWeight(torch.randn(4, 64), None, FASTEST)
    with pytest.raises(TypeError, match="matmul"):
        torch.matmul(torch.randn(2, 64), weight)
    OtherRouter.__module__ = "transformers.models.other"
    router, unused = OtherRouter(64, 64), []
    before = router.weight
    assert not pack_experts(router, linears=FASTEST, routers=FASTEST, on_unused=unused.append)
    assert router.weight is before
    assert dict(router.named_parameters())["weight"] is before
    assert not unused
    monkeypatch.setattr(OtherRouter, "forward", raising(RuntimeError("DefaultCPUAllocator: can't allocate memory")))
    with pytest.raises(RuntimeError, match="allocate"):
        pack_experts(router, linears=FASTEST, routers=FASTEST, on_unused=unused.append)


@torch.inference_mode()
def test_a_gate_of_one_output_has_the_same_bits_in_any_company() -> None:
    """The sigmoid of a narrow product, as of Qwen2-MoE's shared expert, is computed row by row."""
    gate = PackedLinear(torch.randn(1, 64), None)
    rows = torch.randn(100, 64)
    together = nn.functional.sigmoid(gate(rows))
    assert torch.equal(together, torch.cat([nn.functional.sigmoid(gate(row)) for row in rows.split(1)]))


def test_modules_of_other_conventions_are_left_alone() -> None:
    """Neither a class of another library called a router nor experts that lie in lists or products of their own."""

    class LearnedRouter(nn.Linear):
        """Might compute anything."""

    assert not pack_experts(nn.ModuleList([LearnedRouter(64, 4)]), linears=FASTEST, routers=FASTEST, on_unused=print)
    for family in ("dbrx", "jetmoe"):
        assert not pack_experts(tiny_model(family), linears=FASTEST, routers=FASTEST, on_unused=print)


def test_a_format_that_the_factory_does_not_support_is_left_alone() -> None:
    """With products of float32 only, experts of bfloat16 keep their weights, and their router is packed."""

    class Singles(type(FASTEST)):  # type: ignore[misc]
        def supports(self, dtype: torch.dtype, num_inputs: int) -> bool:
            return dtype == torch.float32

    model = tiny_model("qwen3_moe", dtype=torch.bfloat16)
    assert len(pack_experts(model, linears=Singles(), routers=Singles(), on_unused=lambda weight: None)) == 3
    assert not any(isinstance(module, PackedExperts) for module in model.modules())
