"""The schemes that people choose by hand, by name: one for every axis of a mesh, and what is computed again.

======================  ==========================================================================
name                    scheme of each axis
======================  ==========================================================================
``ddp``, ``fsdp``       the same on all axes
``hsdp``                ``ddp`` on the first axis, ``fsdp`` on the others (PyTorch FSDP, section 3.2.2)
``tp``, ``sp``, ``cp``, on a mesh of one axis
``ep``
``ddp+tp`` and so on    the first of the two on all axes but the last, the second on the last
``fsdp+cp+tp``          ``cp`` on the last but one, ``tp`` on the last (``sp`` alike), ``fsdp`` on the others
``NAME/selective``      the same, with the core attention computed again in the backward
``NAME/full``           the same, with every layer computed again
======================  ==========================================================================

A baseline is written as constraints. What a scheme means stands in :mod:`autoshard.constraints.schemes`, what is
computed again in :mod:`autoshard.constraints.recomputations`. A baseline is a plan like any other: made by the same
pipeline, written to the same file, run by the same module.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cost_models.spelling import did_you_mean

from ..errors import ConstraintError
from ..mesh import Mesh
from .values import GRANULARITIES, Granularity, Scheme

TITLES: dict[str, str] = {
    "ddp": "data parallel",
    "fsdp": "fully sharded data parallel (ZeRO-3)",
    "hsdp": "hybrid sharded data parallel",
    "tp": "Megatron tensor parallel",
    "sp": "Megatron tensor and sequence parallel",
    "cp": "context parallel",
    "ep": "expert parallel",
}


@dataclass(frozen=True)
class Baseline:
    """A scheme for every axis of a mesh, in mesh order, and what is computed again beside what the model marks.

    ``family`` is the name of the schemes together; ``recomputation`` None where nothing is.
    """

    family: str
    schemes: tuple[Scheme, ...]
    recomputation: Granularity | None = None

    @property
    def name(self) -> str:
        """For example ``ddp+tp``, or ``ddp+tp/full``."""
        return self.family if self.recomputation is None else f"{self.family}/{self.recomputation}"

    @property
    def title(self) -> str:
        """The name in words: ``data parallel with Megatron tensor parallel`` for ``ddp+tp``."""
        schemes = " with ".join(TITLES[part] for part in self.family.split("+"))
        return schemes if self.recomputation is None else f"{schemes}, {self.recomputation} recomputation"

    def constraints(self, mesh: Mesh) -> tuple[str, ...]:
        """The constraints under which a plan is this baseline: ``family dp=ddp``, ``family tp=tp``, ``recomputation
        full`` for ``ddp+tp/full``.
        """
        families = (f"family {axis}={scheme}" for axis, scheme in zip(mesh.axes, self.schemes))
        return (*families, *self.again)

    @property
    def again(self) -> tuple[str, ...]:
        """Of the constraints those on what is computed again: ``recomputation full`` for ``ddp+tp/full``."""
        return () if self.recomputation is None else (f"recomputation {self.recomputation}",)

    def recomputing(self) -> tuple[Baseline, ...]:
        """The same schemes with selective and with full recomputation."""
        return tuple(replace(self, recomputation=granularity) for granularity in GRANULARITIES)


def baselines(mesh: Mesh) -> tuple[Baseline, ...]:
    """Every baseline without recomputation that a mesh of so many axes can have; whether a model can have it is seen
    when it is planned.
    """
    last: tuple[Scheme, ...] = ("tp", "sp", "cp", "ep")
    outer: tuple[Scheme, ...] = ("ddp", "fsdp")
    alike = [Baseline(scheme, (scheme,) * mesh.ndim) for scheme in outer]
    if mesh.ndim == 1:
        return (*alike, *(Baseline(scheme, (scheme,)) for scheme in last))
    hybrid = Baseline("hsdp", ("ddp", *("fsdp",) * (mesh.ndim - 1)))  # type: ignore[arg-type]
    mixed = [Baseline(f"{a}+{b}", (*(a,) * (mesh.ndim - 1), b)) for a in outer for b in last]
    if mesh.ndim > 2:
        inner: tuple[tuple[Scheme, Scheme], ...] = (("cp", "tp"), ("cp", "sp"))
        mixed += [Baseline(f"fsdp+{a}+{b}", (*("fsdp",) * (mesh.ndim - 2), a, b)) for a, b in inner]  # type: ignore[arg-type]
    return (*alike, hybrid, *mixed)


def baseline(name: str, mesh: Mesh) -> Baseline:
    """The baseline of a name, with recomputation or without.

    Raises:
        ConstraintError: a mesh of so many axes has none of that name.
    """
    plain = baselines(mesh)
    known = {found.name: found for base in plain for found in (base, *base.recomputing())}
    if name not in known:
        raise ConstraintError(
            f"unknown baseline {name!r}; on the mesh {mesh} there are {', '.join(base.name for base in plain)}, each "
            f"also with {' or '.join(f'/{each}' for each in GRANULARITIES)} behind it{did_you_mean(name, known)}"
        )
    return known[name]
