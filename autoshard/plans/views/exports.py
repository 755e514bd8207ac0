"""A plan's placements for other systems: DTensor's ``parallelize_module`` and XLA's partition specs, as Python source.

What is exported is where tensors lie: parameters, buffers, inputs, outputs. Which collectives run is then decided by
the system that takes them, so the plan's predicted time does not carry over.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, product

from ...layout import Layout, Placement
from ...mesh import Mesh
from ..plan import ShardingPlan, TensorEntry
from ..text.name_patterns import Line, Pattern, Repeats, count_repeats, fold, prefix_of, prefixes

_PARALLELIZE = '''\
# Placements of {model} on the mesh {mesh} in DTensor's terms. Written by `autoshard export`.
#
#     mesh = init_device_mesh(device_type, MESH_SHAPE, mesh_dim_names=MESH_AXES)
#     model = parallelize(model, mesh)
#
# It says where parameters and buffers lie. Which collectives run is DTensor's own choice; the plan's are run by
# autoshard.parallelize. INPUTS and OUTPUTS are for the caller: distribute_tensor(tokens, mesh, INPUTS["tokens"]).

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
{strided}from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

MESH_AXES = {axes}
MESH_SHAPE = {shape}


class Placed(ParallelStyle):
    """Lays out parameters and buffers that a module holds itself, one placement per mesh axis."""

    def __init__(self, placements):
        self.placements = placements

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, placements in self.placements.items():
            tensor = getattr(module, name)
            placed = distribute_tensor(tensor, device_mesh, placements, src_data_rank=self.src_data_rank)
            if isinstance(tensor, nn.Parameter):
                placed = nn.Parameter(placed, requires_grad=tensor.requires_grad)
            setattr(module, name, placed)
        return module


PLAN = {{
{plan}}}

INPUTS = {{
{inputs}}}

OUTPUTS = {{
{outputs}}}


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Places every tensor of the plan; a parameter that several modules share stays shared."""
    shared = {{}}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shared.setdefault(id(parameter), []).append(name)
    parallelize_module(model, mesh, PLAN)
    for names in shared.values():
        owners = [(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names]
        placed = next((p for o, n in owners if hasattr(p := getattr(o, n), "placements")), None)
        for owner, name in owners if placed is not None and len(owners) > 1 else []:
            setattr(owner, name, placed)
    return model
'''

_STRIDED = "from torch.distributed.tensor.placement_types import _StridedShard\n"

_SPECS = '''\
# Partition specs of {model} on the mesh {mesh}. Written by `autoshard export`.
#
# A spec has one entry per tensor dim: None for a dim that is whole, the mesh axis that cuts it, or a tuple of axes, the
# outermost first: ("dp", "tp") cuts over dp, and each block again over tp. For PyTorch/XLA,
#     mark_sharding(tensor, Mesh(device_ids, MESH_SHAPE, MESH_AXES), spec_of(name))
# and for JAX, PartitionSpec(*spec_of(name)). What has addends, P(sum), or is cut in
# parts, S(0/3), has no spec: INEXPRESSIBLE lists it.

import re

MESH_AXES = {axes}
MESH_SHAPE = {shape}

# A pattern of names (a regular expression that matches the whole name), and the spec of each.
SPECS = (
{specs})

INEXPRESSIBLE = (
{inexpressible})


def spec_of(name):
    """The spec of a parameter, buffer, input or output, by its name."""
    for pattern, spec in SPECS:
        if re.fullmatch(pattern, name):
            return spec
    raise KeyError(f"the plan has no partition spec for {{name!r}}")
'''


def parallelize_module_source(plan: ShardingPlan) -> str:
    """Python source that places a model's parameters and buffers by ``parallelize_module``."""
    modules: dict[str, dict[str, Layout]] = {}
    lines = _fold((*plan.parameters, *plan.buffers))
    repeats = count_repeats(entry.name for entry in (*plan.parameters, *plan.buffers))
    for prefix in _mixed(line.pattern for line in lines):
        repeats.pop(prefix, None)
    for line in lines:
        for glob in _globs(line.pattern, repeats):
            module, _, name = glob.rpartition(".")
            modules.setdefault(module, {})[_unglob(name)] = line.value
    styles = [
        f"{module!r}: Placed({{{', '.join(f'{name!r}: {_placements(layout)}' for name, layout in held.items())}}}),"
        for module, held in modules.items()
    ]
    has_parts = any(entry.layout.has_parts for entry in (*plan.parameters, *plan.buffers, *plan.inputs, *plan.outputs))
    return _PARALLELIZE.format(
        **_header(plan),
        strided=_STRIDED if has_parts else "",
        plan=_indented(styles),
        inputs=_indented(f"{entry.name!r}: {_placements(entry.layout)}," for entry in plan.inputs),
        outputs=_indented(f"{entry.name!r}: {_placements(entry.layout)}," for entry in plan.outputs),
    )


def partition_spec_source(plan: ShardingPlan) -> str:
    """Python source that gives every parameter, buffer, input and output a partition spec, where it has one."""
    entries = (*plan.parameters, *plan.buffers, *plan.inputs, *plan.outputs)
    repeats = count_repeats(entry.name for entry in entries)
    expressible = [entry for entry in entries if not _has_no_spec(entry.layout)]
    ranks = {(entry.name, entry.layout): len(entry.shape) for entry in expressible}
    lines = fold([(entry.name, (entry.layout, ranks[entry.name, entry.layout])) for entry in expressible])
    lines.sort(key=lambda line: bool(line.pattern.choices))  # a name that is no pattern goes before those that match it
    specs = (f"({_raw(_regex(line.pattern, repeats))}, {partition_spec(*line.value, plan.mesh)!r})," for line in lines)
    partial = (f"{entry.name!r}," for entry in entries if _has_no_spec(entry.layout))
    return _SPECS.format(**_header(plan), specs=_indented(specs), inexpressible=_indented(partial))


def partition_spec(layout: Layout, dims: int, mesh: Mesh) -> tuple[str | tuple[str, ...] | None, ...]:
    """The partition spec of a tensor of so many dims: for each, no axis, one, or several with the outermost first.

    Raises:
        ValueError: the layout has addends, or dims cut in parts, which a partition spec cannot express.
    """
    if _has_no_spec(layout):
        raise ValueError("a partition spec cannot express addends, nor dims that are cut in parts")
    axes = [tuple(mesh.axes[axis] for axis in layout.axes_of(dim)) for dim in range(dims)]
    return tuple(names[0] if len(names) == 1 else names or None for names in axes)


def _has_no_spec(layout: Layout) -> bool:
    return layout.has_partial or layout.has_parts


def _header(plan: ShardingPlan) -> dict[str, str]:
    return {
        "model": repr(plan.model),
        "mesh": str(plan.mesh),
        "axes": repr(plan.mesh.axes),
        "shape": repr(plan.mesh.shape),
    }


def _fold(entries: Iterable[TensorEntry]) -> Sequence[Line[Layout]]:
    return fold([(entry.name, entry.layout) for entry in entries])


def _placements(layout: Layout) -> str:
    placements = [_placement(placement) for placement in layout]
    return f"({', '.join(placements)}{',' if len(placements) == 1 else ''})"


def _placement(placement: Placement) -> str:
    match placement.kind:
        case "R":
            return "Replicate()"
        case "S" if placement.parts:
            return f"_StridedShard({placement.dim}, split_factor={len(placement.parts)})"
        case "S":
            return f"Shard({placement.dim})"
        case "P":
            return f"Partial({placement.reduce!r})"


def _globs(pattern: Pattern, repeats: Repeats) -> Iterator[str]:
    """Globs of one component each that match the names of a pattern: ``*`` for every index, else one by one."""
    choices = [
        ["*"] if runs == (range(repeats.get(prefix, 0)),) and len(runs[0]) > 1 else [str(i) for i in chain(*runs)]
        for runs, prefix in zip(pattern.choices, prefixes(pattern))
    ]
    for chosen in product(*choices):
        indices = iter(chosen)
        yield ".".join(next(indices) if c is None else re.sub(r"[*?[]", r"[\g<0>]", c) for c in pattern.components)


def _mixed(patterns: Iterable[Pattern]) -> set[str]:
    """The paths that are followed by a name somewhere: there ``*`` would match more than the indices."""
    return {
        prefix_of(pattern.components[:i])
        for pattern in patterns
        for i, component in enumerate(pattern.components)
        if component is not None
    }


def _unglob(name: str) -> str:
    return re.sub(r"\[([*?[])\]", r"\1", name)


def _regex(pattern: Pattern, repeats: Repeats) -> str:
    """A regular expression for the names of a pattern."""
    choices = zip(pattern.choices, prefixes(pattern))
    components = []
    for component in pattern.components:
        if component is not None:
            components.append(re.escape(component))
            continue
        runs, prefix = next(choices)
        indices = [str(i) for i in chain(*runs)]
        every = runs == (range(repeats[prefix]),) and len(indices) > 1
        components.append(r"\d+" if every else indices[0] if len(indices) == 1 else f"(?:{'|'.join(indices)})")
    return r"\.".join(components) + re.escape(pattern.role)


def _raw(regex: str) -> str:
    """A raw string where one can say it."""
    plain = regex.isprintable() and regex.isascii() and "'" not in regex and not regex.endswith("\\")
    return f"r'{regex}'" if plain else repr(regex)


def _indented(lines: Iterable[str]) -> str:
    return "".join(f"    {line}\n" for line in lines)
