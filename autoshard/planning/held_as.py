"""A plan whose parameters are held as in another one, so that a module can serve both."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase

from ..errors import MeshError
from ..layout import format_layout
from ..mesh import Mesh
from ..plans import ShardingPlan

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def held_pins(plan: ShardingPlan, names: Collection[str], mesh: Mesh) -> Iterator[str]:
    """Pins that hold parameters as a plan holds them.

    Layers that it holds alike have one pin (``layers.*.wq.weight=dp:S(0) tp:R``): pins that tell layers apart would
    have each of them decided for itself.

    Args:
        names: the parameters that are to be pinned; those that the plan does not have are left free.
        mesh: that of the new plan.

    Raises:
        MeshError: the plan was made for another mesh.
    """
    if (plan.mesh.axes, plan.mesh.shape) != (mesh.axes, mesh.shape):
        raise MeshError(f"parameters cannot be held as in a plan for {plan.mesh} on a mesh {mesh}")
    layouts = {e.name: format_layout(e.layout, mesh) for e in plan.parameters if e.name in names}
    pinned: set[str] = set()
    for name, layout in layouts.items():
        pattern = _NUMBER.sub("*", name)
        found = {layouts.get(other, "") for other in names if fnmatchcase(other, pattern)}
        pin = f"{pattern if found == {layout} else name}={layout}"
        if pin not in pinned:
            pinned.add(pin)
            yield pin
