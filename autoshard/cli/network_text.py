"""What the axes of a plan's mesh run on, in sentences: what the plan says, or what a profile says of an older plan."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

from ..plans import ShardingPlan
from ..plans.views.axis_use import network_lines


def network_sentences(plan: ShardingPlan, hardware: str | None = None) -> tuple[str, ...]:
    """Sentences on the link of each axis: what the plan says; else what is read off the profile that it was priced
    with, ``hardware``, a name or a file, or the one known by the name that the plan has; one that says so where that is
    not at hand.

    Raises:
        ProfileError: ``hardware`` cannot be read, or has no such mesh.
    """
    if hardware is None and plan.network:
        return _sentences(plan)
    if find_spec("numpy") is None:
        return ("What its axes run on is said where numpy is installed, which profiles are read with.",)
    from cost_models import PRESETS, ProfileError, axis_networks, load_profile

    missing = "What its axes run on is not known here: the profile is not at hand; give --hardware FILE."
    if hardware is None and plan.hardware not in PRESETS:
        return (missing,)
    try:
        profile = load_profile(hardware or plan.hardware)
        topology = profile.topology(plan.mesh.axes, plan.mesh.shape, plan.mesh.order or None)
    except ProfileError:
        if hardware is not None:
            raise
        return (missing,)
    lines = _sentences(replace(plan, network=axis_networks(profile, topology)))
    if profile.fingerprint != plan.hardware_fingerprint:
        lines = (*lines, f"The plan was priced with another version of {profile.name} than this.")
    return lines


def _sentences(plan: ShardingPlan) -> tuple[str, ...]:
    axes, order = network_lines(plan)
    return f"Its {axes}.", f"{order[0].upper()}{order[1:]}."
