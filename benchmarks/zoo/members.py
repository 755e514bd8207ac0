"""All members by name."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from .diffusion import DIFFUSION
from .member import Member
from .plain import PLAIN

MEMBERS: dict[str, Member] = {member.name: member for member in (*PLAIN, *DIFFUSION)}

if find_spec("transformers"):
    from .decoders import DECODERS
    from .encoders import ENCODERS

    MEMBERS = {member.name: member for member in (*DECODERS, *ENCODERS)} | MEMBERS
else:
    print("transformers is not installed, and its models are left out; make zoo installs it", file=sys.stderr)
