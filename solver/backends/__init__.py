"""The backends by name. A backend is loaded when it is asked for: `import solver` needs no OR-Tools and no PuLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import Final, cast

from ..problem import ProblemError
from .backend import Answer, Backend, BackendUnavailable, Request


@dataclass(frozen=True)
class BackendEntry:
    """Where a backend lives.

    Attributes:
        module, factory, arguments: `factory(**arguments)` of the module `module` below this package is the backend.
        packages: what must be installed for it, as import names (which are also the names on PyPI).
        summary: when to use it, in a line.
    """

    module: str
    factory: str
    arguments: Mapping[str, object]
    packages: tuple[str, ...]
    summary: str

    @property
    def available(self) -> bool:
        """Whether its packages are installed."""
        return all(find_spec(package) for package in self.packages)

    def load(self) -> Backend:
        """The backend; import errors of its packages pass through."""
        module = import_module(f".{self.module}", __name__)
        return cast(Backend, getattr(module, self.factory)(**self.arguments))


_ORTOOLS = ("ortools",)
_OF_DECOMPOSITION = ("ortools", "highspy")

# What to give to pip for a package that is installed as a part of autoshard: its extra.
_INSTALLED_BY = dict.fromkeys(("ortools", "highspy", "pulp"), "'autoshard[plan]'")

BACKENDS: Final = MappingProxyType(
    {
        "auto": BackendEntry(
            "decomposition.decomposition",
            "Decomposition",
            {"exact_pairs": 200_000, "exact_arcs": 2_000_000},
            _OF_DECOMPOSITION,
            "the default: highs and decomposition",
        ),
        "highs": BackendEntry("mathopt", "MathOpt", {"solver": "HIGHS"}, _ORTOOLS, "branch and cut"),
        "scip": BackendEntry("mathopt", "MathOpt", {"solver": "GSCIP"}, _ORTOOLS, "branch and cut, slower"),
        "cp-sat": BackendEntry("cpsat", "CpSat", {}, _ORTOOLS, "exact integers; small problems with tight memory"),
        "cbc": BackendEntry("linear_pulp", "Pulp", {"solver": "PULP_CBC_CMD"}, ("pulp",), "the second opinion"),
        "pulp-highs": BackendEntry("linear_pulp", "Pulp", {"solver": "HiGHS"}, ("pulp", "highspy"), "without OR-Tools"),
        "decomposition": BackendEntry(
            "decomposition.decomposition", "Decomposition", {}, _OF_DECOMPOSITION, "large problems; anytime"
        ),
        "exhaustive": BackendEntry("exhaustive", "Exhaustive", {}, (), "tries everything; the oracle of the tests"),
    }
)


def load_backend(name: str) -> Backend:
    """The backend called `name`.

    Raises:
        ProblemError: no backend has that name.
        BackendUnavailable: a package that it needs is not installed.
    """
    if name not in BACKENDS:
        raise ProblemError(f"unknown backend {name!r}: choose one of {', '.join(BACKENDS)}")
    entry = BACKENDS[name]
    missing = [package for package in entry.packages if not find_spec(package)]
    if missing:
        ready = ", ".join(other for other, entry in BACKENDS.items() if entry.available)
        wanted = " ".join(dict.fromkeys(_INSTALLED_BY.get(package, package) for package in missing))
        raise BackendUnavailable(
            f"backend {name!r} needs {' and '.join(missing)}, not installed here: pip install {wanted}. "
            f"Available now: {ready}"
        )
    return entry.load()


__all__ = ["BACKENDS", "Answer", "Backend", "BackendEntry", "BackendUnavailable", "Request", "load_backend"]
