"""Profile files: YAML in, a checked ``Profile`` out, and back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from .errors import ProfileError
from .profile import VERSION, Profile
from .profile_schema import profile_of
from .profile_text import parse, spell, text_of
from .safe_yaml import of_another_kind
from .spelling import did_you_mean

READABLE = (1, VERSION)

_PRESET_DIR = Path(__file__).parent / "profiles"
PRESETS: tuple[str, ...] = (
    *("a100-40", "cpu-gloo", "dgx-a100", "dgx-b200", "dgx-h100", "dgx-h200"),
    *("h100-500w-hbm2e", "h100-mosaicml", "tpu-v5e"),
)

# The entries that describe a network, by the kind of network: a profile has those of one kind.
_NETWORKS = (("devices_per_host", "torus", "links"), ("axes",))


def load_profile(name_or_path: str) -> Profile:
    """The profile of a preset (one of ``PRESETS``) or of a file.

    A preset's name wins over a file of the same name. What is neither a preset nor a file, has no folder and does not
    end in ``.yaml`` or ``.yml``, is taken for a misspelt name.

    Raises:
        ProfileError: an unknown name (the message lists the presets), a file that is missing, too large or not YAML, a
            file of another version, or an entry that is missing, unknown or out of its range (the message names it).
    """
    if name_or_path in PRESETS:
        return _read(_PRESET_DIR / f"{name_or_path}.yaml")
    path = Path(name_or_path)
    if name_or_path and os.path.isdir(path):  # the path of no name is the folder one is in
        raise ProfileError(f"hardware profile {path} is a folder; give the file in it, for example {path}/profile.yaml")
    if len(path.parts) < 2 and path.suffix not in (".yaml", ".yml") and not os.path.isfile(path):
        raise ProfileError(
            f"unknown hardware profile {name_or_path!r}; the presets are {', '.join(PRESETS)}"
            f"{did_you_mean(name_or_path, PRESETS)}; a profile of your own is given by its path, for example "
            "my-cluster.yaml"
        )
    if not os.path.exists(path):  # unlike Path.exists, never an OSError: a name too long, a folder closed to us
        raise ProfileError(f"hardware profile {path}: there is no such file; the presets are {', '.join(PRESETS)}")
    return _read(path)


def parse_profile(text: str, origin: str) -> Profile:
    """The profile that a text describes; ``origin`` names it in errors.

    Raises:
        ProfileError: as ``load_profile``.
    """
    try:
        return profile_of(_entries(text))
    except ProfileError as reason:
        raise ProfileError(f"hardware profile {origin}: {reason}") from None


def dump_profile(profile: Profile) -> str:
    """The text of a file that reads back as the same profile, of the same fingerprint.

    Raises:
        ProfileError: the profile breaks a rule of profile files (it was made by hand, or by a bad fit).
    """
    text = spell(profile.entries())
    if parse_profile(text, f"{profile.name} as text") != profile:
        raise ProfileError(f"hardware profile {profile.name!r} cannot be written: it would read back as another one")
    return text


def _read(path: Path) -> Profile:
    try:
        text = text_of(path)
    except ProfileError as reason:
        raise ProfileError(f"hardware profile {path}: {reason}") from None
    return parse_profile(text, str(path))


def _entries(text: str) -> dict[Any, Any]:
    """The entries of the file, with those of the preset that it is based on; the version is checked first.

    Raises:
        ProfileError: it is not one YAML mapping, of another version, or based on what is no preset.
    """
    entries = parse(text)
    if not isinstance(entries, dict):
        found = "is empty" if entries is None else f"holds a {type(entries).__name__}"
        raise ProfileError(f"the file {found}; a profile is a mapping that starts with version: {VERSION}")
    if kind := of_another_kind(entries, "profile"):
        raise ProfileError(f"the file is {kind}, and no profile; name a preset or a profile")
    version = entries.get("version")
    if "version" in entries and (version not in READABLE or isinstance(version, bool)):
        known = " and ".join(map(str, READABLE))
        raise ProfileError(f"the file is of version {version!r}; this autoshard reads versions {known}")
    return _on_its_base(entries) if "based_on" in entries else entries


def _on_its_base(entries: dict[Any, Any]) -> dict[Any, Any]:
    """The entries of the named preset, overridden table by table; a network of another kind replaces the preset's."""
    name = entries["based_on"]
    if name not in PRESETS:
        close = did_you_mean(name, PRESETS) if isinstance(name, str) else ""
        raise ProfileError(f"based_on is {name!r}, which is no preset; they are {', '.join(PRESETS)}{close}")
    base = parse(text_of(_PRESET_DIR / f"{name}.yaml"))
    del base["provenance"], base["name"]  # both are of the base's own constants
    for own, others in (_NETWORKS, _NETWORKS[::-1]):
        if any(key in entries for key in own) and not any(key in entries for key in others):
            base = {key: value for key, value in base.items() if key not in others}
    return _merged(base, {key: value for key, value in entries.items() if key != "based_on"})


def _merged(base: dict[Any, Any], over: dict[Any, Any]) -> dict[Any, Any]:
    both = {key: (base.get(key), value) for key, value in over.items()}
    return base | {
        key: _merged(below, above) if isinstance(below, dict) and isinstance(above, dict) else above
        for key, (below, above) in both.items()
    }
