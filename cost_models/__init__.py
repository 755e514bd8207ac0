"""Seconds of operations and collectives on a known machine. Knows bytes, flops and links, never tensors or layouts.

>>> from cost_models import load_profile
>>> profile = load_profile("dgx-h100")
>>> topology = profile.topology(("dp", "tp"), (8, 8))
>>> [link.name for link in topology.links]
['InfiniBand NDR', 'NVLink 4']
>>> f"{topology.collective_s('all_gather', axis=1, size_bytes=1 << 30) * 1e3:.2f} ms"
'2.78 ms'

Names are loaded when they are first used: whoever reads a plan needs the YAML reader that lives here, and no numpy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .collective_kinds import COLLECTIVE_KINDS
    from .collectives import wire_bytes
    from .compute import Compute, Efficiency
    from .curve import Curve
    from .errors import ProfileError
    from .hosts import Hosts
    from .kernel_kinds import OP_KINDS
    from .link import Algorithm, Link
    from .measured import MeasuredMesh
    from .network_words import axis_networks
    from .optimizers import OPTIMIZERS, OptimizerPolicy, optimizer_policy
    from .profile import Profile
    from .profile_file import PRESETS, dump_profile, load_profile, parse_profile
    from .provenance import Provenance, Residual
    from .topology import Route, Topology
    from .torus import Torus

_HOMES = {
    "COLLECTIVE_KINDS": "collective_kinds",
    "wire_bytes": "collectives",
    "Compute": "compute",
    "Efficiency": "compute",
    "OP_KINDS": "kernel_kinds",
    "Curve": "curve",
    "ProfileError": "errors",
    "Hosts": "hosts",
    "Algorithm": "link",
    "Link": "link",
    "MeasuredMesh": "measured",
    "axis_networks": "network_words",
    "OPTIMIZERS": "optimizers",
    "OptimizerPolicy": "optimizers",
    "optimizer_policy": "optimizers",
    "Profile": "profile",
    "PRESETS": "profile_file",
    "dump_profile": "profile_file",
    "load_profile": "profile_file",
    "parse_profile": "profile_file",
    "Provenance": "provenance",
    "Residual": "provenance",
    "Route": "topology",
    "Topology": "topology",
    "Torus": "torus",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "COLLECTIVE_KINDS",
    "OPTIMIZERS",
    "OP_KINDS",
    "PRESETS",
    "Algorithm",
    "Compute",
    "Curve",
    "Efficiency",
    "Hosts",
    "Link",
    "MeasuredMesh",
    "OptimizerPolicy",
    "Profile",
    "ProfileError",
    "Provenance",
    "Residual",
    "Route",
    "Topology",
    "Torus",
    "axis_networks",
    "dump_profile",
    "load_profile",
    "parse_profile",
    "wire_bytes",
    "optimizer_policy",
]
