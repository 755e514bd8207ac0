"""The names that options take, from their tables: ``--help`` lists them, and a shell completes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

Option: TypeAlias = Literal["--hardware", "--optimizer", "--backend", "--baseline"]


def option_names() -> dict[Option, tuple[str, ...]]:
    """For each option that takes one of some names, these names; what else it takes stands there in words.

    The tables are loaded here, as only ``--help`` and a shell that completes need them.
    """
    from cost_models import OPTIMIZERS, PRESETS
    from solver.backends import BACKENDS

    from ..constraints.baselines import baselines
    from ..constraints.values import GRANULARITIES
    from ..mesh import Mesh

    one, several = ([base.name for base in baselines(Mesh.parse(mesh))] for mesh in ("a=2", "a=2,b=2"))
    schemes = tuple(dict.fromkeys([*one, *several]))
    return {
        "--hardware": (*PRESETS, "or a file"),
        "--optimizer": OPTIMIZERS,
        "--backend": tuple(BACKENDS),
        "--baseline": (*schemes, *(f"each also with /{each}" for each in GRANULARITIES)),
    }


def completing(option: Option) -> Callable[[str], list[str]]:
    """What completes the beginning of a name; files the shell completes itself."""

    def complete(incomplete: str) -> list[str]:  # typer asks for this name
        return [name for name in option_names()[option] if name.startswith(incomplete) and " " not in name]

    return complete
