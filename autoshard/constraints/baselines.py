"""The schemes that people choose by hand, by name: one scheme for every axis of a mesh, written as constraints.

======================  ==========================================================================
name                    scheme of each axis
======================  ==========================================================================
``ddp``, ``fsdp``       the same on all axes
``hsdp``                ``ddp`` on the first axis, ``fsdp`` on the others (PyTorch FSDP, section 3.2.2)
``tp``, ``sp``, ``ep``  on a mesh of one axis
``ddp+tp`` and so on    the first of the two on all axes but the last, the second on the last
======================  ==========================================================================

What a scheme means stands in :mod:`autoshard.constraints.schemes`. A baseline is a plan like any other: made by the
same pipeline, written to the same file, run by the same module.
"""

from __future__ import annotations

from dataclasses import dataclass

from cost_models.spelling import did_you_mean

from ..errors import ConstraintError
from ..mesh import Mesh
from .values import Scheme

TITLES: dict[str, str] = {
    "ddp": "data parallel",
    "fsdp": "fully sharded data parallel (ZeRO-3)",
    "hsdp": "hybrid sharded data parallel",
    "tp": "Megatron tensor parallel",
    "sp": "Megatron tensor and sequence parallel",
    "ep": "expert parallel",
}


@dataclass(frozen=True)
class Baseline:
    """A scheme for every axis of a mesh, in mesh order."""

    name: str
    schemes: tuple[Scheme, ...]

    @property
    def title(self) -> str:
        """The name in words: ``data parallel with Megatron tensor parallel`` for ``ddp+tp``."""
        return " with ".join(TITLES[part] for part in self.name.split("+"))

    def constraints(self, mesh: Mesh) -> tuple[str, ...]:
        """The constraints under which a plan is this baseline: ``family dp=ddp``, ``family tp=tp`` for ``ddp+tp``."""
        return tuple(f"family {axis}={scheme}" for axis, scheme in zip(mesh.axes, self.schemes))


def baselines(mesh: Mesh) -> tuple[Baseline, ...]:
    """Every baseline that a mesh of so many axes can have; whether a model can have it is seen when it is planned."""
    last: tuple[Scheme, ...] = ("tp", "sp", "ep")
    outer: tuple[Scheme, ...] = ("ddp", "fsdp")
    alike = [Baseline(scheme, (scheme,) * mesh.ndim) for scheme in outer]
    if mesh.ndim == 1:
        return (*alike, *(Baseline(scheme, (scheme,)) for scheme in last))
    hybrid = Baseline("hsdp", ("ddp", *("fsdp",) * (mesh.ndim - 1)))  # type: ignore[arg-type]
    mixed = [Baseline(f"{a}+{b}", (*(a,) * (mesh.ndim - 1), b)) for a in outer for b in last]
    return (*alike, hybrid, *mixed)


def baseline(name: str, mesh: Mesh) -> Baseline:
    """The baseline of a name.

    Raises:
        ConstraintError: a mesh of so many axes has none of that name.
    """
    known = {found.name: found for found in baselines(mesh)}
    if name not in known:
        raise ConstraintError(
            f"unknown baseline {name!r}; on the mesh {mesh} there are {', '.join(known)}{did_you_mean(name, known)}"
        )
    return known[name]
