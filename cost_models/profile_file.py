"""Profile files: YAML in, a checked ``Profile`` out.

``docs/cost_models.md`` shows a file and names its entries.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from .compute import Compute, Dtype, OpKind
from .errors import ProfileError, nearest
from .link import CollectiveKind, Link
from .profile import Profile
from .safe_yaml import parse, text_of

VERSION = 1
MAX_ERRORS_SHOWN = 5

_PRESET_DIR = Path(__file__).parent / "profiles"
PRESETS: tuple[str, ...] = ("cpu-gloo", "dgx-a100", "dgx-h100")


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
    if len(path.parts) < 2 and path.suffix not in (".yaml", ".yml") and not os.path.isfile(path):
        raise ProfileError(
            f"unknown hardware profile {name_or_path!r}; the presets are {', '.join(PRESETS)}"
            f"{nearest(name_or_path, PRESETS)}; a profile of your own is given by its path, for example my-cluster.yaml"
        )
    if not os.path.exists(path):  # unlike Path.exists, never an OSError: a name too long, a folder closed to us
        raise ProfileError(f"hardware profile {path}: there is no such file; the presets are {', '.join(PRESETS)}")
    return _read(path)


def _read(path: Path) -> Profile:
    try:
        entries = _entries(text_of(path))
        return _profile(_validated(entries))
    except ProfileError as reason:
        raise ProfileError(f"hardware profile {path}: {reason}") from None


def _entries(text: str) -> dict[Any, Any]:
    """The entries of the file, untouched but for the version, which is checked first.

    Raises:
        ProfileError: it is not one YAML mapping, or of another version.
    """
    entries = parse(text)
    if not isinstance(entries, dict):
        found = "is empty" if entries is None else f"holds a {type(entries).__name__}"
        raise ProfileError(f"the file {found}; a profile is a mapping that starts with version: {VERSION}")
    version = entries.get("version")
    if "version" in entries and (version != VERSION or isinstance(version, bool)):
        raise ProfileError(f"the file is of version {version!r}; this autoshard reads version {VERSION}")
    return entries


def _whole(value: Any) -> Any:
    """``80e9`` counts as the integer it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Count = Annotated[int, BeforeValidator(_whole), Field(ge=1)]
Words = Annotated[str, Field(min_length=1, max_length=2000), AfterValidator(str.strip)]


class _Entry(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class _LinkEntry(_Entry):
    name: Words
    launch_s: Seconds
    latency_s: Seconds
    bandwidth_bytes_per_s: Positive
    efficiency: dict[CollectiveKind, Share] = {}
    reduce_scatter_as_all_reduce: bool = False

    @model_validator(mode="after")
    def _all_reduce_holds_a_reduce_scatter(self) -> _LinkEntry:
        reduce, scatter = self.efficiency.get("all_reduce", 1.0), self.efficiency.get("reduce_scatter", 1.0)
        if reduce > 2 * scatter:
            raise ValueError(
                f"efficiency is not monotone: all_reduce {reduce:g} is above twice reduce_scatter {scatter:g}, so an "
                "all-reduce would cost less than the reduce-scatter inside it"
            )
        return self


class _LinksEntry(_Entry):
    intra_host: _LinkEntry
    inter_host: _LinkEntry | None = None


class _ComputeEntry(_Entry):
    launch_s: Seconds
    memory_bandwidth_bytes_per_s: Positive
    peak_flops_per_s: dict[Dtype, Positive]
    compute_efficiency: dict[Literal["default", OpKind], Share]
    memory_efficiency: dict[Literal["default", OpKind], Share]

    @model_validator(mode="after")
    def _fallbacks_are_there(self) -> _ComputeEntry:
        if "float32" not in self.peak_flops_per_s:
            raise ValueError("peak_flops_per_s.float32 is missing (integers and booleans are priced by it)")
        for table in ("compute_efficiency", "memory_efficiency"):
            if "default" not in getattr(self, table):
                raise ValueError(f"{table}.default is missing (it stands for the kinds that are not named)")
        return self


class _ProfileEntry(_Entry):
    version: Literal[1]
    name: Words
    provenance: Words
    devices_per_host: Count | Literal["any"]
    memory_bytes: Count
    compute: _ComputeEntry
    links: _LinksEntry


def _validated(entries: dict[Any, Any]) -> _ProfileEntry:
    """The entries as values in their ranges.

    Raises:
        ProfileError: entries are missing, unknown or out of their range; the message names the first of them.
    """
    try:
        return _ProfileEntry.model_validate(entries)
    except ValidationError as reason:
        problems = [_problem(dict(error)) for error in reason.errors(include_url=False)]
    shown = problems[:MAX_ERRORS_SHOWN]
    rest = f" (and {len(problems) - len(shown)} more)" if len(problems) > len(shown) else ""
    raise ProfileError("; ".join(shown) + rest)


def _problem(error: dict[str, Any]) -> str:
    """One fault in the words of the file: which entry, what was found, what is expected."""
    where = ".".join(str(part) for part in error["loc"] if part not in ("[key]", "int", "literal['any']"))
    if error["type"] == "missing":
        return f"{where} is missing"
    if error["type"] == "extra_forbidden":
        return f"{where} is not an entry of a profile{nearest(where.rpartition('.')[2], _ENTRY_NAMES)}"
    expected = error["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    if error["type"] == "value_error":
        return f"{where}: {expected}"
    return f"{where} is {error['input']!r:.60}, expected {expected}"


_ENTRY_NAMES = sorted(
    {name for entry in (_ProfileEntry, _ComputeEntry, _LinksEntry, _LinkEntry) for name in entry.model_fields}
)


def _profile(entry: _ProfileEntry) -> Profile:
    compute, links = entry.compute, entry.links
    return Profile(
        name=entry.name,
        provenance=entry.provenance,
        fingerprint=_fingerprint(entry),
        devices_per_host=None if entry.devices_per_host == "any" else entry.devices_per_host,
        memory_bytes=entry.memory_bytes,
        compute=Compute(**compute.model_dump()),
        intra_host=Link(**links.intra_host.model_dump()),
        inter_host=Link(**links.inter_host.model_dump()) if links.inter_host else None,
    )


def _fingerprint(entry: _ProfileEntry) -> str:
    """A digest of the values themselves: comments, layout, key order and spelled-out defaults do not change it."""
    values = entry.model_dump(mode="json", exclude={"provenance"})
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return f"sha256:{hashlib.sha256(canonical.encode()).hexdigest()}"
