"""Seconds of operations and collectives on a known machine. Knows bytes, flops and links, never tensors or layouts.

>>> profile = load_profile("dgx-h100")
>>> topology = profile.topology(("dp", "tp"), (8, 8))
>>> [link.name for link in topology.links]
['InfiniBand NDR', 'NVLink 4']
>>> f"{topology.collective_s('all_gather', axis=1, size_bytes=1 << 30) * 1e3:.2f} ms"
'2.58 ms'
"""

from .collectives import wire_bytes
from .compute import OP_KINDS, Compute, Efficiency
from .curve import Curve
from .errors import ProfileError
from .hosts import Hosts
from .link import COLLECTIVE_KINDS, Algorithm, Link
from .measured import MeasuredMesh
from .profile import Profile
from .profile_file import PRESETS, dump_profile, load_profile, parse_profile
from .provenance import Provenance, Residual
from .topology import Route, Topology
from .torus import Torus

__all__ = [
    "COLLECTIVE_KINDS",
    "OP_KINDS",
    "PRESETS",
    "Algorithm",
    "Compute",
    "Curve",
    "Efficiency",
    "Hosts",
    "Link",
    "MeasuredMesh",
    "Profile",
    "ProfileError",
    "Provenance",
    "Residual",
    "Route",
    "Topology",
    "Torus",
    "dump_profile",
    "load_profile",
    "parse_profile",
    "wire_bytes",
]
