"""A plan whose parameters are held as in another one, so that a module can serve both."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase

from cost_models.spelling import did_you_mean

from ..errors import MeshError, PlanMismatchError
from ..layout import format_layout
from ..mesh import Mesh
from ..plans import ShardingPlan
from ..plans.natural_order import natural_key

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def check_same_parameters(plan: ShardingPlan, parameters: Iterable[Collection[str]]) -> None:
    """Checks that a plan has the parameters of a model: one module is to be served by both plans.

    Args:
        parameters: every one of the model, by all its names.

    Raises:
        PlanMismatchError: it has others; the message names the first that differs.
    """
    listed = {entry.name for entry in plan.parameters}
    names = list(parameters)
    known = {name for called in names for name in called}
    more = [entry.name for entry in plan.parameters if entry.name not in known]
    fewer = [min(called) for called in names if listed.isdisjoint(called)]
    if more or fewer:
        name = min(more or fewer, key=natural_key)
        has, lacks = ("the plan", "the model") if more else ("the model", "the plan")
        raise PlanMismatchError(
            f"parameters cannot be held as in a plan of another model ({plan.model}): {has} has {name}, which {lacks} "
            f"does not have{did_you_mean(name, fewer if more else ())}; give a plan of this model"
        )


def held_pins(plan: ShardingPlan, shapes: Mapping[str, tuple[int, ...]], mesh: Mesh) -> Iterator[str]:
    """Pins that hold parameters as a plan holds them.

    Layers that it holds alike have one pin (``layers.*.wq.weight=dp:S(0) tp:R``): pins that tell layers apart would
    have each of them decided for itself.

    Args:
        shapes: of the parameters that are to be pinned, by every name of theirs; those that the plan does not have are
            left free.
        mesh: that of the new plan.

    Raises:
        MeshError: the plan was made for another mesh.
        PlanMismatchError: it was made for another model: a parameter has another shape there, or none is there.
    """
    if (plan.mesh.axes, plan.mesh.shape) != (mesh.axes, mesh.shape):
        raise MeshError(f"parameters cannot be held as in a plan for {plan.mesh} on a mesh {mesh}")
    known = [entry for entry in plan.parameters if entry.name in shapes]
    if shapes and not known:
        raise PlanMismatchError(
            f"parameters cannot be held as in a plan of another model ({plan.model}): "
            f"it has none of {min(shapes)}, ...; give a plan of this model"
        )
    for entry in known:
        if entry.shape != shapes[entry.name]:
            raise PlanMismatchError(
                f"parameters cannot be held as in a plan of another model ({plan.model}): {entry.name} is "
                f"{list(entry.shape)} there and {list(shapes[entry.name])} here; give a plan of this model"
            )
    layouts = {entry.name: format_layout(entry.layout, mesh) for entry in known}
    pinned: set[str] = set()
    for name, layout in layouts.items():
        pattern = _NUMBER.sub("*", name)
        found = {layouts.get(other, "") for other in shapes if fnmatchcase(other, pattern)}
        pin = f"{pattern if found == {layout} else name}={layout}"
        if pin not in pinned:
            pinned.add(pin)
            yield pin
