"""What local graphs say of shapes and memory, against torch asked anew for every operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves, tree_map

import autoshard
from autoshard.lowering import LocalProgram, Rank, lower
from autoshard.lowering.adapter import WAIT, collective_name, without_values
from autoshard.lowering.local_values import Results, value_of

from ..oracles import groups_of
from ..plans_of import planned
from .as_before import check_as_before

aten = torch.ops.aten


def lowered(name: str, mesh: str) -> LocalProgram:
    found = planned(name, mesh)
    groups = groups_of(found.plan.mesh)
    return lower(found.graph, found.plan, Rank((0,) * found.plan.mesh.ndim, torch.device("cpu"), groups))


def looks(value: Any) -> list[object]:
    return [
        (leaf.shape, leaf.stride(), leaf.dtype, leaf.storage_offset()) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in tree_leaves(value)
    ]


def anew(nodes: list[fx.Node]) -> dict[fx.Node, Any]:
    """Every node's value, made by running it without values in the order of the graph."""
    made: dict[fx.Node, Any] = {}
    for node in nodes:
        noted = node.meta["val"]
        if node.op == "placeholder":
            whole = torch.empty(node.meta["value"].storages.size_bytes // noted.itemsize, dtype=noted.dtype)
            made[node] = whole.as_strided(noted.shape, noted.stride(), noted.storage_offset())
        elif node.target is WAIT:
            made[node] = made[node.all_input_nodes[0]]
        elif collective_name(node) is not None:
            in_place = str(node.target).endswith("all_reduce_.default")
            made[node] = made[node.all_input_nodes[0]] if in_place else torch.empty(noted.shape, dtype=noted.dtype)
        else:
            args, kwargs = tree_map(
                lambda arg: made[arg] if isinstance(arg, fx.Node) else arg, (node.args, node.kwargs)
            )
            made[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return made


@pytest.mark.parametrize("name", ["llama", "gpt2", "moe", "conv", "assorted"])
@pytest.mark.parametrize("mesh", ["dp=2", "dp=2,tp=2"])
def test_graphs_say_of_every_value_what_torch_says_of_it(name: str, mesh: str) -> None:
    program, shared = lowered(name, mesh), 0
    for graph in (program.forward.graph, program.backward and program.backward.graph):
        nodes = [node for node in graph.nodes if node.op != "output"] if graph else []
        with without_values(torch.device("cpu")):
            made = anew(nodes)
        of_torch: dict[int, list[int]] = {}
        of_graph: dict[object, list[int]] = {}
        for node in nodes:
            assert looks(node.meta["val"]) == looks(made[node]), node
            leaves = [leaf for leaf in tree_leaves(made[node]) if isinstance(leaf, torch.Tensor)]
            for leaf, (_, storage) in zip(leaves, node.meta["value"].leaves(), strict=True):
                if leaf.numel():  # all tensors without elements lie at one place
                    of_torch.setdefault(leaf.untyped_storage()._cdata, []).append(id(node))
                    of_graph.setdefault(storage, []).append(id(node))
                    assert storage.size_bytes == leaf.untyped_storage().nbytes()
        if graph is program.forward.graph:  # what the backward takes may share memory already
            assert sorted(of_torch.values()) == sorted(of_graph.values())
            shared += sum(len(nodes) > 1 for nodes in of_torch.values())
    assert shared


def test_equal_values_that_lie_apart_stay_apart_and_views_of_them_too() -> None:
    with without_values(torch.device("cpu")):
        results, graph = Results(), fx.Graph()
        nodes = []
        for name in ("a", "b"):
            nodes.append(graph.placeholder(name))
            nodes[-1].meta["value"] = value_of(torch.empty(4, 6))
        first, second = (results.of(aten.t.default, (node,), {}) for node in nodes)
        assert first.tensor is second.tensor and first.looks == second.looks
        assert first.storages is nodes[0].meta["value"].storages
        assert second.storages is nodes[1].meta["value"].storages
        halves = results.of(aten.split.Tensor, (nodes[1], 3, 1), {})
        assert set(halves.storages) == {nodes[1].meta["value"].storages} and halves[1].looks != halves[0].looks
        again = results.of(aten.add.Tensor, (nodes[0], nodes[1]), {})
        assert again.storages not in (first.storages, second.storages)
        written = results.of(aten.add_.Tensor, (nodes[1], nodes[0]), {})
        assert written.storages is second.storages
        whole, real = (results.of(aten.full.default, ((2,), number), {}) for number in (1, 1.0))
        assert (whole.tensor.dtype, real.tensor.dtype) == (torch.int64, torch.float32)


class Conjugates(nn.Module):
    """Of a conjugate the real part, which torch takes of the conjugate of that."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, features) to a number."""
        h = self.enter(x)
        z = torch.complex(h, 2 * h).conj()
        return (z.real * z.imag).square().mean()


def test_a_conjugate_that_was_sent_has_parts() -> None:
    torch.manual_seed(0)
    model, args = Conjugates().double(), (torch.randn(6, 4, dtype=torch.float64),)
    pins = ["/_conj=a:S(0) -> a:S(0)", "/_conj.1=a:R -> a:R"]
    plan = autoshard.plan(model, args, mesh="a=2", hardware="cpu-gloo", constraints=pins, cache=False)
    check_as_before(model, args, plan, rtol=1e-9, atol=1e-12)
