"""What ``export`` writes, run in real processes: every tensor lies where the plan says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from autoshard.layout import local_shape
from autoshard.lowering.placements import placements_of
from autoshard.plans import ShardingPlan, TensorEntry
from autoshard.plans.views.exports import parallelize_module_source, partition_spec_source

from ..plans.synthetic import layout, sharded_plan
from .harness import run_ranks


class Layer(nn.Module):
    """The parameters of a layer of the plan."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({name: nn.Linear(256, 256, bias=False) for name in ("wq", "wo")})
        self.norm = nn.RMSNorm(256)


class Model(nn.Module):
    """The tensors of the plan, one of them shared by two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(512, 256)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(256, 512, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("freqs", torch.arange(12.0).reshape(4, 3))


def plan() -> ShardingPlan:
    """The synthetic plan for the model above: its buffer cut, its embedding cut over both axes."""
    made = sharded_plan(2)
    embed = TensorEntry("embed.weight", (512, 256), "float32", layout("dp:S(0) tp:S(1)"))
    parameters = tuple(embed if entry.name == embed.name else entry for entry in made.parameters)
    return replace(made, parameters=parameters, buffers=(TensorEntry("freqs", (4, 3), "float32", layout("dp:S(0)")),))


def run_export(source: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(source, "exported.py", "exec"), names)
    return names


def place_and_look(source: str) -> list[str]:
    """Places the model as the exported source says; what is wrong with it, in sentences."""
    torch.manual_seed(0)
    exported, model, reference = run_export(source), Model(), plan()
    whole = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    mesh = init_device_mesh("cpu", exported["MESH_SHAPE"], mesh_dim_names=exported["MESH_AXES"])
    placed = exported["parallelize"](model, mesh)
    held = dict(placed.named_parameters(remove_duplicate=False)) | dict(placed.named_buffers())
    wrong = []
    coordinate = tuple(mesh.get_coordinate() or ())
    for entry in (*reference.parameters, *reference.buffers):
        tensor = held[entry.name]
        if not isinstance(tensor, DTensor) or tensor.placements != placements_of(entry.layout):
            wrong.append(f"{entry.name} is {getattr(tensor, 'placements', 'no DTensor')}")
        elif tuple(tensor.to_local().shape) != local_shape(entry.shape, entry.layout, reference.mesh, coordinate):
            wrong.append(f"{entry.name} has the shard {tuple(tensor.to_local().shape)}")
        elif not torch.equal(tensor.full_tensor(), whole[entry.name]):
            wrong.append(f"{entry.name} has other values")
    if placed.head.weight is not placed.embed.weight:
        wrong.append("the shared parameter is shared no more")
    if not isinstance(placed.layers[0].attention["wq"].weight, nn.Parameter):
        wrong.append("a parameter is none")
    tokens = distribute_tensor(torch.zeros(4, 128, dtype=torch.int64), mesh, exported["INPUTS"]["tokens"])
    if tuple(tokens.to_local().shape) != (2, 128):
        wrong.append(f"tokens have the shard {tuple(tokens.to_local().shape)}")
    return wrong


def test_the_exported_source_places_every_tensor_as_planned() -> None:
    assert run_ranks(4, place_and_look, parallelize_module_source(plan())) == [[]] * 4


def test_partition_specs_cut_as_the_layouts_do() -> None:
    """The shards that a spec means, by the rule of mark_sharding: its axes cut the dim, the outermost first."""
    made = plan()
    exported = run_export(partition_spec_source(made))
    sizes = dict(zip(exported["MESH_AXES"], exported["MESH_SHAPE"]))
    for entry in (*made.parameters, *made.buffers, *made.inputs, *made.outputs):
        spec = exported["spec_of"](entry.name)
        assert len(spec) == len(entry.shape)
        for coordinate in made.mesh.coordinates():
            at = dict(zip(made.mesh.axes, coordinate))
            shape = []
            for size, axes in zip(entry.shape, spec):
                for axis in (axes,) if isinstance(axes, str) else axes or ():
                    assert at[axis] < sizes[axis]
                    size //= sizes[axis]
                shape.append(size)
            assert tuple(shape) == local_shape(entry.shape, entry.layout, made.mesh, coordinate)
    with pytest.raises(KeyError, match=r"no partition spec for 'layers\.9x\.norm\.weight'"):
        exported["spec_of"]("layers.9x.norm.weight")
