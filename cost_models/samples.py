"""Samples of a calibration run: a JSONL file that grows while the run measures.

The first line says what was measured on (:class:`Header`), every other line is one repetition of one point: how long a
collective of some bytes on a mesh axis took, or a kernel of some flops and bytes, or both at once, or different
kernels in a row. A run that is
interrupted leaves every line it finished, and the same command continues behind them; ``{"complete": true}`` ends a
file that needs no more.

>>> point = CollectivePoint("all_reduce", "dp", 65536, held_out=False)
>>> Sample(point, 0, 1e-3).line()
'{"collective":"all_reduce","axis":"dp","size_bytes":65536,"held_out":false,"round":0,"seconds":0.001}'
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

VERSION = 1
MAX_BYTES = 256 << 20


class SamplesError(ValueError):
    """A samples file that cannot be read, written or continued."""


@dataclass(frozen=True, order=True)
class CollectivePoint:
    """One collective over one mesh axis, or over several that are one group (``dp+tp``), all groups of ranks at once.

    ``size_bytes`` is the larger of a rank's input and output buffer. A point that is ``held_out`` is measured like any
    other and never fitted: the error there is what a fit is worth.
    """

    kind: str
    axis: str
    size_bytes: int
    held_out: bool

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the axes, in the order of the mesh."""
        return tuple(self.axis.split("+"))


@dataclass(frozen=True, order=True)
class KernelPoint:
    """One kernel, on all ranks at once.

    ``name`` says which one of its kind ran, ``shape`` on what; ``flops`` counts a multiply-add as two, ``bytes_moved``
    what is read and written.
    """

    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    flops: float
    bytes_moved: float
    held_out: bool


@dataclass(frozen=True, order=True)
class TogetherPoint:
    """A collective that is on its way while a kernel runs ``kernels`` times, and is waited for behind the last of them:
    on all ranks at once. Each alone is a point of the same run.
    """

    collective: CollectivePoint
    kernel: KernelPoint
    kernels: int

    @property
    def held_out(self) -> bool:
        """False: what such points decide is one number, which all of them are fitted to."""
        return False


@dataclass(frozen=True, order=True)
class RowPoint:
    """Different kernels one after the other, with ``views`` of a tensor between them, as operators of a step are, and
    behind them a collective or none: on all ranks at once. Each kernel alone, again and again, is a point of the same
    run, and so are the collective alone and the row without it.
    """

    kernels: tuple[KernelPoint, ...]
    views: int
    collective: CollectivePoint | None = None

    @property
    def held_out(self) -> bool:
        """False: what such points decide is one number, which all of them are fitted to."""
        return False


Point: TypeAlias = CollectivePoint | KernelPoint | TogetherPoint | RowPoint


@dataclass(frozen=True)
class Sample:
    """One repetition: seconds of the slowest rank."""

    point: Point
    round: int
    seconds: float

    def line(self) -> str:
        """The line of the file, without its end."""
        said = _entries(self.point) | {"round": self.round, "seconds": self.seconds}
        return json.dumps(said, separators=(",", ":"))


def _entries(point: Point) -> dict[str, Any]:
    if isinstance(point, TogetherPoint):
        return {"travels": _entries(point.collective), "beside": _entries(point.kernel), "kernels": point.kernels}
    if isinstance(point, RowPoint):
        behind = {"behind": _entries(point.collective)} if point.collective else {}
        return {"row": [_entries(kernel) for kernel in point.kernels], "views": point.views, **behind}
    if isinstance(point, CollectivePoint):
        said: dict[str, Any] = {"collective": point.kind, "axis": point.axis, "size_bytes": point.size_bytes}
    else:
        said = {"kernel": point.kind, "name": point.name, "dtype": point.dtype, "shape": list(point.shape)}
        said |= {"flops": point.flops, "bytes_moved": point.bytes_moved}
    return said | {"held_out": point.held_out}


@dataclass(frozen=True)
class Header:
    """What the samples were measured on. Samples of two runs belong together where all but ``created`` and ``command``
    are equal.

    Attributes:
        mesh: axes and sizes, ``dp=2,tp=2``.
        hosts: host of every rank, numbered from 0 in the order of their first rank.
        device, backend: ``cpu`` and ``gloo``, ``cuda`` and ``nccl``.
        machine: name of the device, cores, memory, threads of a rank and the like, as text.
        versions: of torch and what else decides speed.
        created, command: when and how the first run of the file was started.
    """

    mesh: str
    hosts: tuple[int, ...]
    device: str
    backend: str
    machine: Mapping[str, str] = field(hash=False)
    versions: Mapping[str, str] = field(hash=False)
    created: str
    command: str

    def line(self) -> str:
        """The line of the file, without its end."""
        return json.dumps({"autoshard_samples": VERSION} | self.__dict__, separators=(",", ":"))

    def differences(self, other: Header) -> list[str]:
        """What keeps the samples of two runs apart, in words; empty where nothing does."""
        mine, theirs = _flat(self), _flat(other)
        return [
            f"{name} {mine.get(name, 'missing')!s} instead of {theirs.get(name, 'missing')!s}"
            for name in sorted(mine.keys() | theirs.keys())
            if mine.get(name) != theirs.get(name)
        ]


@dataclass(frozen=True)
class Samples:
    """A samples file, read."""

    header: Header
    samples: tuple[Sample, ...]
    complete: bool

    def by_point(self) -> dict[Point, list[float]]:
        """The seconds of every point, in the order measured."""
        found: dict[Point, list[float]] = {}
        for sample in self.samples:
            found.setdefault(sample.point, []).append(sample.seconds)
        return found


def read_samples(path: str | os.PathLike[str]) -> Samples:
    """The samples in a file. A last line that was cut short, as a run that was killed leaves it, is left out.

    Raises:
        SamplesError: the file is missing, unreadable, too large, of another version, or damaged; names the line.
    """
    given = os.fspath(path)
    lines = _read(Path(given)).split(b"\n")[:-1]  # what follows the last end of line was cut short
    if not lines:
        raise SamplesError(f"{given} holds no samples: its first line is missing or cut short; remove the file")
    header = _header(given, lines[0])
    complete = len(lines) > 1 and lines[-1] == _COMPLETE.encode()
    body = lines[1:-1] if complete else lines[1:]
    return Samples(header, tuple(_sample(given, number, line) for number, line in enumerate(body, 2)), complete)


class SamplesFile:
    """A samples file being written: made new, or continued.

    Raises:
        SamplesError: the file is damaged, holds the samples of another mesh or machine, or cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], header: Header) -> None:
        self.path = os.fspath(path)
        self.before = self._before(header)
        self.count = len(self.before.samples)
        try:
            self._file = open(self.path, "ab", buffering=0)
        except OSError as error:
            raise SamplesError(f"cannot write the samples {self.path}: {_said(error)}") from None
        self._good = 0
        self._keep_whole_lines()
        if not self._good:
            self._append(header.line())

    def _before(self, header: Header) -> Samples:
        if not os.path.exists(self.path) or not _read(Path(self.path)).count(b"\n"):
            return Samples(header, (), False)  # no file, or a run that ended within its first line
        before = read_samples(self.path)
        differences = header.differences(before.header)
        if differences:
            raise SamplesError(
                f"the samples in {self.path} are of another run, this one has {'; '.join(differences)}; continue "
                "with the command and on the machine they were made with, or name another file with --samples"
            )
        return before

    def _keep_whole_lines(self) -> None:
        content = _read(Path(self.path))
        self._good = content.rfind(b"\n") + 1
        self._truncate()

    def append(self, samples: Iterable[Sample]) -> None:
        """Adds samples, whole or not at all.

        Raises:
            SamplesError: they cannot be written, for example because the disk is full; what was there stays.
        """
        lines = [sample.line() for sample in samples]
        if lines:
            self._append("\n".join(lines))
            self.count += len(lines)

    def sync(self) -> None:
        """Waits until what was added is on the disk.

        Raises:
            SamplesError: it cannot be written there.
        """
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._failed(error) from None

    def finish(self) -> None:
        """Marks the file as complete."""
        self._append(_COMPLETE)
        self.sync()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _append(self, text: str) -> None:
        data = text.encode() + b"\n"
        try:
            written = 0
            while written < len(data):
                written += self._file.write(data[written:])
        except OSError as error:
            self._truncate()
            raise self._failed(error) from None
        self._good += len(data)

    def _failed(self, error: OSError) -> SamplesError:
        return SamplesError(
            f"cannot write the samples {self.path}: {_said(error)}; {self.count} samples are kept there, and the same "
            "command continues behind them"
        )

    def _truncate(self) -> None:
        """Cuts off the end of the file behind its last whole line."""
        try:
            if os.fstat(self._file.fileno()).st_size > self._good:
                self._file.truncate(self._good)
        except OSError:  # a device: nothing to cut
            return


_COMPLETE = '{"complete": true}'
_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Whole = Annotated[int, Field(ge=0, lt=1 << 62)]
_Word = Annotated[str, Field(min_length=1, max_length=1000)]


class _Line(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class _Collective(_Line):
    collective: _Word
    axis: _Word
    size_bytes: Annotated[int, Field(gt=0, lt=1 << 62)]
    held_out: bool

    def point(self) -> CollectivePoint:
        return CollectivePoint(self.collective, self.axis, self.size_bytes, self.held_out)


class _Kernel(_Line):
    kernel: _Word
    name: _Word
    dtype: _Word
    shape: list[_Whole]
    flops: _Amount
    bytes_moved: _Amount
    held_out: bool

    def point(self) -> KernelPoint:
        amounts = (tuple(self.shape), self.flops, self.bytes_moved)
        return KernelPoint(self.kernel, self.name, self.dtype, *amounts, self.held_out)


class _Together(_Line):
    travels: _Collective
    beside: _Kernel
    kernels: Annotated[int, Field(gt=0, lt=1 << 62)]

    def point(self) -> TogetherPoint:
        return TogetherPoint(self.travels.point(), self.beside.point(), self.kernels)


class _Row(_Line):
    row: Annotated[list[_Kernel], Field(min_length=1, max_length=100)]
    views: _Whole
    behind: _Collective | None = None

    def point(self) -> RowPoint:
        behind = self.behind.point() if self.behind else None
        return RowPoint(tuple(kernel.point() for kernel in self.row), self.views, behind)


class _Measured(_Line):
    round: _Whole
    seconds: _Seconds


class _CollectiveLine(_Collective, _Measured):
    pass


class _KernelLine(_Kernel, _Measured):
    pass


class _TogetherLine(_Together, _Measured):
    pass


class _RowLine(_Row, _Measured):
    pass


class _HeaderLine(_Line):
    autoshard_samples: Literal[1]
    mesh: _Word
    hosts: list[_Whole]
    device: _Word
    backend: _Word
    machine: dict[_Word, str]
    versions: dict[_Word, str]
    created: _Word
    command: str


_LINE: TypeAdapter[_CollectiveLine | _KernelLine | _TogetherLine | _RowLine] = TypeAdapter(
    _CollectiveLine | _KernelLine | _TogetherLine | _RowLine
)
_LINES = {b'"beside"': "_TogetherLine", b'"row"': "_RowLine", b'"kernel"': "_KernelLine"}
"""By what only such a line says, the model of the line that an error is to be about."""


def _sample(path: str, number: int, line: bytes) -> Sample:
    try:
        entry = _LINE.validate_json(line)
    except ValidationError as reason:
        which = next((name for key, name in _LINES.items() if key in line), "_CollectiveLine")
        raise SamplesError(f"{path}, line {number}: {_problem(reason, which)}; remove the line or the file") from None
    return Sample(entry.point(), entry.round, entry.seconds)


def _header(path: str, line: bytes) -> Header:
    try:
        entry = _HeaderLine.model_validate_json(line)
    except ValidationError as reason:
        raise SamplesError(f"{path} is no samples file of version {VERSION}: {_problem(reason)}") from None
    values = entry.model_dump(exclude={"autoshard_samples"})
    return Header(**values | {"hosts": tuple(values["hosts"])})


def _problem(reason: ValidationError, only: str = "") -> str:
    errors = reason.errors(include_url=False, include_context=False)
    error = next((e for e in errors if only in map(str, e["loc"])), errors[0])
    where = ".".join(str(part) for part in error["loc"] if not str(part).endswith("Line"))
    said = error["msg"][:1].lower() + error["msg"][1:]
    return f"{where}: {said}" if where else said


def _flat(header: Header) -> dict[str, object]:
    """The facts, by name, in which two headers must agree for their samples to belong together."""
    found: dict[str, object] = {name: getattr(header, name) for name in ("mesh", "hosts", "device", "backend")}
    for name in ("machine", "versions"):
        found |= {f"{name} {key}": value for key, value in getattr(header, name).items()}
    return found


def _read(path: Path) -> bytes:
    try:
        if path.exists() and not path.is_file():
            raise SamplesError(f"cannot use {path} for samples: it is not an ordinary file")
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise SamplesError(f"cannot read the samples {path}: {_said(error)}") from None
    if len(content) > MAX_BYTES:
        raise SamplesError(f"the samples {path} are larger than {MAX_BYTES} bytes")
    return content


def _said(error: OSError) -> str:
    said = error.strerror or str(error)
    return said[:1].lower() + said[1:]
