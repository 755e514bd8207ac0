"""What capture keeps of a model: names, ties, inputs, phases; and that it leaves the model alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from autoshard.capture import CapturedGraph, capture, input_names
from examples.gpt2 import GPT2
from examples.llama import Llama, llama3_8b

from ..models import EXAMPLES, GPT, LLAMA, MLP, WithLoss, graph_of, llama, mlp
from ..oracles import interpret

aten = torch.ops.aten


def _names(graph: CapturedGraph, kind: str) -> list[str]:
    return [node.name for _, node in graph.of_kind(kind)]  # type: ignore[arg-type]


@pytest.mark.parametrize("name", EXAMPLES)
def test_parameters_and_buffers_stand_under_their_fqns_and_names_are_unique(name: str) -> None:
    model, _ = EXAMPLES[name]()
    graph = graph_of(name)
    names = [node.name for node in graph.nodes]
    assert len(set(names)) == len(names)
    assert set(_names(graph, "parameter")) == {name for name, _ in model.named_parameters()}
    assert set(_names(graph, "buffer")) <= {name for name, _ in model.named_buffers()}
    assert [name for name, _ in graph.gradients] != []


def test_operators_are_named_by_module_path_and_role() -> None:
    names = _names(graph_of("llama"), "operator")
    for expected in ("layers.0.attention.wq/mm", "layers.0.attention/attention", "layers.0.feed_forward.w2/bwd.mm"):
        assert expected in names
    for root in ("/_log_softmax", "/bwd._log_softmax_backward_data"):
        assert root in names
    backward = [node for _, node in graph_of("llama").of_kind("operator") if node.phase == "backward"]
    assert backward and all("/bwd." in node.name for node in backward)


def test_tied_embeddings_are_one_parameter_with_an_alias() -> None:
    graph = graph_of("gpt2")
    assert graph.aliases == (("lm_head.weight", "wte.weight"),)
    assert "lm_head.weight" not in _names(graph, "parameter")
    assert [name for name, _ in graph.gradients].count("wte.weight") == 1


def test_a_parameter_that_the_step_never_reads_is_listed_as_unused() -> None:
    model = MLP()
    model.spare = nn.Linear(3, 2)
    graph = capture(model, (torch.randn(4, 8),))
    assert [(name, meta.shape) for name, meta in graph.unused] == [("spare.weight", (2, 3)), ("spare.bias", (2,))]
    assert not any(name.startswith("spare") for name in _names(graph, "parameter"))
    assert graph_of("gpt2").unused == ()


def test_a_frozen_parameter_has_no_gradient() -> None:
    model = MLP()
    model.up.weight.requires_grad_(False)
    graph = capture(model, (torch.randn(4, 8),))
    assert "up.weight" in _names(graph, "parameter")
    assert {name for name, _ in graph.gradients} == {"up.bias", "down.weight", "down.bias"}


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, batch: dict[str, Tensor], pair: tuple[Tensor, Tensor], scale: float, *, flip: bool = False):
        x = self.lin(batch["x"]) * scale + batch["shift"] - pair[0] * pair[1]
        return {"out": x.neg() if flip else x, "scale": scale, "sum": x.sum(0)}


def _nested(**kwargs):
    batch = {"x": torch.randn(2, 4), "shift": torch.randn(4)}
    return {"batch": batch, "pair": (torch.ones(4), torch.ones(2, 4)), "scale": 2.0} | kwargs


def test_nested_inputs_are_named_by_their_keys_and_python_values_are_constants() -> None:
    graph = capture(Nested(), (), _nested())
    assert _names(graph, "input") == ["batch.x", "batch.shift", "pair.0", "pair.1"]
    (constant,) = [value for value, ref in zip(graph.constants, graph.outputs) if ref is None]
    assert constant == 2.0
    assert _names(graph, "tangent") == ["grad.0", "grad.2"]


def test_positional_and_keyword_arguments_capture_the_same_graph() -> None:
    values = _nested()
    assert capture(Nested(), tuple(values.values())).fingerprint == capture(Nested(), (), values).fingerprint
    assert input_names(Nested(), tuple(values.values()), {}) == input_names(Nested(), (), values)


class Checked(nn.Module):
    """Looks at all of its numbers first, as what joins texts and pictures does in transformers."""

    def __init__(self, table: int | None) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(4, 4), table

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:  # at the first call, which is made on tensors without memory
            self.table = 2
        torch._check_tensor_all(x < 100)
        torch._check_tensor_all_with(ValueError, x > -100, lambda: "too small")
        if self.table == 3:
            torch._check(x.max().item() < 100)
        return self.linear(x).sum() * self.table


@pytest.mark.parametrize("table", [None, 3])
def test_checks_of_numbers_are_left_out(table: int | None) -> None:
    graph = capture(Checked(table), (torch.ones(2, 4),), guarded=True)
    names = [node.name for _, node in graph.of_kind("operator") if node.phase == "forward"]
    assert names == ["linear/t", "linear/addmm", "/sum", "/mul"]
    with pytest.raises(ValueError, match="too small"):
        Checked(table)(torch.full((2, 4), -200.0))


class Alike(nn.Module):
    """Adds up what is filled in the shape of other tensors, or of pieces of them that lie otherwise in memory."""

    def __init__(self, fill: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.fill = nn.Linear(4, 6), fill

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        return self.fill(h[:, 2:].mT) + h[:, 2:].mT


FILLS: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros": torch.zeros_like,
    "ones": torch.ones_like,
    "a number": lambda h: torch.full_like(h, 0.5),
    "by name": lambda h: torch.full_like(h, fill_value=-2),
    "of another dtype": lambda h: torch.full_like(h, 1.5, dtype=torch.int64),
    "truths": lambda h: torch.ones_like(h, dtype=torch.bool) & torch.zeros_like(h > 0),
    "complex": lambda h: torch.full_like(h, 2, dtype=torch.complex64).real,
    "in order": lambda h: torch.ones_like(h, memory_format=torch.contiguous_format).flatten().view(h.shape),
    "as it lies": lambda h: torch.zeros_like(h).mT.reshape(-1).view(h.mT.shape).mT,
    "without dims": lambda h: torch.ones_like(h.sum()) + torch.zeros_like(h[:0]).sum(),
}


@pytest.mark.parametrize("fill", FILLS)
def test_a_tensor_that_is_filled_in_the_shape_of_another_is_made_of_nothing(fill: str) -> None:
    model, x = Alike(FILLS[fill]), torch.randn(3, 4)
    graph = capture(model, (x,))
    filled = [node for _, node in graph.of_kind("operator") if node.op is aten.full.default]
    assert filled and not any(node.inputs for node in filled)
    assert not any("_like" in node.name for node in graph.nodes)
    tangent = torch.randn(4, 3)
    values = interpret(graph, {**dict(model.named_parameters()), "x": x, "grad.0": tangent})
    expected = model(x)
    expected.backward(tangent)
    (made,) = (values[ref.node, ref.output] for ref in graph.outputs if ref)
    torch.testing.assert_close(made, expected)
    for name, ref in graph.gradients:
        torch.testing.assert_close(values[ref.node, ref.output], model.get_parameter(name).grad)


def test_another_python_constant_is_another_graph() -> None:
    prints = {capture(Nested(), (), _nested(**change)).fingerprint for change in ({}, {"scale": 3.0}, {"flip": True})}
    assert len(prints) == 3


def test_a_scalar_result_is_the_loss_and_other_results_get_a_tangent_of_their_shape() -> None:
    loss, logits = graph_of("mlp with loss"), graph_of("mlp")
    for graph, shape in [(loss, ()), (logits, (6, 8))]:
        (tangent,) = [node for _, node in graph.of_kind("tangent")]
        assert tangent.name == "grad.0" and tangent.phase == "backward"
        assert tangent.outputs[0] is not None and tangent.outputs[0].shape == shape


@pytest.mark.parametrize("way", ["no_grad", "frozen"])
def test_inference_captures_the_forward_alone(way: str) -> None:
    model, args = mlp()
    if way == "frozen":
        model.requires_grad_(False)
        graph = capture(model, args)
    else:
        with torch.no_grad():
            graph = capture(model, args)
    assert graph.gradients == () and not _names(graph, "tangent")
    assert all(node.phase == "forward" for node in graph.nodes)
    assert len(_names(graph, "operator")) >= 3


class Attending(nn.Module):
    """Attention imported by name, with grouped heads and a bias on request."""

    def __init__(self, kv_heads: int = 4, bias: bool = False, causal: bool = False) -> None:
        super().__init__()
        self.mix = nn.Linear(3, 3)
        self.kv_heads, self.causal = kv_heads, causal
        self.bias = torch.nn.Buffer(torch.zeros(5, 5)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        q, kv = self.mix(x), self.mix(x[:, : self.kv_heads])
        attend = scaled_dot_product_attention
        grouped = self.kv_heads < x.shape[1]
        return attend(q, kv, kv, attn_mask=self.bias, is_causal=self.causal, enable_gqa=grouped)


@pytest.mark.parametrize(("kv_heads", "bias", "causal"), [(4, False, True), (4, True, False), (2, False, True)])
def test_attention_is_one_forward_and_one_backward_node(kv_heads: int, bias: bool, causal: bool) -> None:
    graph = capture(Attending(kv_heads, bias, causal), (torch.randn(2, 4, 5, 3),))
    ops = [str(node.op) for _, node in graph.of_kind("operator")]
    assert ops.count("autoshard.attention.default") == 1
    assert ops.count("autoshard.attention_backward.default") == 1
    assert not any("scaled_dot_product" in op or "softmax" in op for op in ops)
    (node,) = [node for _, node in graph.of_kind("operator") if str(node.op) == "autoshard.attention.default"]
    assert len(node.inputs) == (4 if bias else 3)


def test_llama_and_gpt2_have_one_attention_each_way_per_layer() -> None:
    for name in ("llama", "llama odd", "gpt2"):
        ops = [str(node.op) for _, node in graph_of(name).of_kind("operator")]
        assert ops.count("autoshard.attention.default") == ops.count("autoshard.attention_backward.default") == 1


def test_capture_leaves_the_model_as_it_was() -> None:
    model, args = llama()
    before = {name: (id(t), t.clone()) for name, t in [*model.named_parameters(), *model.named_buffers()]}
    forward = F.scaled_dot_product_attention
    capture(model, args)
    assert F.scaled_dot_product_attention is forward
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert id(tensor) == before[name][0] and torch.equal(tensor, before[name][1])
    assert model.training and all(p.grad is None for p in model.parameters())


def test_a_model_of_thirty_gigabytes_on_the_meta_device_is_captured_without_memory() -> None:
    """Half a billion parameters a layer would not fit: capture succeeds because nothing is allocated."""
    model, args = llama3_8b()
    model.layers = model.layers[:1]
    graph = capture(model, args)
    total = sum(node.outputs[0].size_bytes for _, node in graph.of_kind("parameter") if node.outputs[0])
    assert total > 2 << 30
    assert all(p.device.type == "meta" for p in model.parameters())


def test_modules_that_are_reached_some_other_way_are_known_by_their_names() -> None:
    class Around(nn.Module):
        """Hands on what it has not, as wrappers for adapters do."""

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("inner"), name)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
            self.backwards = list(reversed(self.layers))
            self.by_name = {"first": self.layers[0]}
            self.again = nn.ModuleDict({"layers": self.layers})

        def forward(self, x: Tensor) -> Tensor:
            x = self.again["layers"][0](x)
            for layer in self.backwards:
                x = layer(x)
            return self.by_name["first"](x).sum()

    graph = capture(Around(Around(Listed())), (torch.randn(2, 4),))
    products = [n.name for _, n in graph.of_kind("operator") if n.phase == "forward" and n.op is aten.addmm.default]
    assert products == [f"inner.inner.layers.{k}" for k in ("0/addmm", "1/addmm", "0/addmm.1", "0/addmm.2")]


def test_the_fingerprint_is_equal_for_another_device_and_for_another_capture() -> None:
    for kind, config in [(Llama, LLAMA), (GPT2, GPT)]:
        model, args = kind(config), (torch.zeros(4, 5, dtype=torch.int64),) * 2
        first, again = capture(model, args).fingerprint, capture(model, args).fingerprint
        with torch.device("meta"):
            elsewhere = capture(kind(config), (torch.zeros(4, 5, dtype=torch.int64),) * 2)
        assert first == again == elsewhere.fingerprint


def test_the_fingerprint_differs_when_a_shape_a_dtype_or_an_argument_does() -> None:
    class Scaled(MLP):
        def forward(self, x: Tensor, by: float = 1.0) -> Tensor:
            return super().forward(x) * by

    x = torch.randn(6, 8)
    prints = [
        capture(MLP(), (x,)).fingerprint,
        capture(MLP(), (torch.randn(7, 8),)).fingerprint,
        capture(MLP(hidden=13), (x,)).fingerprint,
        capture(MLP().double(), (x.double(),)).fingerprint,
        capture(Scaled(), (x, 2.0)).fingerprint,
        capture(Scaled(), (x, 3.0)).fingerprint,
        capture(WithLoss(MLP()), (x, x)).fingerprint,
    ]
    assert len(set(prints)) == len(prints)
