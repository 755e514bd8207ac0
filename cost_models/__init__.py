"""Seconds of operations and collectives on a known machine. Knows bytes, flops and links, never tensors or layouts.

>>> profile = load_profile("dgx-h100")
>>> topology = profile.topology(("dp", "tp"), (8, 8))
>>> [link.name for link in topology.links]
['InfiniBand NDR', 'NVLink 4']
>>> f"{topology.collective_s('all_gather', axis=1, size_bytes=1 << 30) * 1e3:.2f} ms"
'2.56 ms'
"""

from .compute import OP_KINDS
from .errors import ProfileError
from .link import COLLECTIVE_KINDS, Link
from .memory import OPTIMIZERS, OptimizerPolicy, optimizer_policy
from .profile import Profile
from .profile_file import PRESETS, load_profile
from .topology import Topology

__all__ = [
    "COLLECTIVE_KINDS",
    "OPTIMIZERS",
    "OP_KINDS",
    "PRESETS",
    "Link",
    "OptimizerPolicy",
    "Profile",
    "ProfileError",
    "Topology",
    "load_profile",
    "optimizer_policy",
]
