"""The text of a plan file as a plan. The file is data from anywhere: every defect ends in one kind of error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from decimal import Decimal

from pydantic import ValidationError

from ...errors import PlanFileError
from ...layout import Layout, parse_layout
from ...mesh import Mesh
from ...precision import Precision
from ..expert_distance import ExpertDistance, PartDifference, TensorDifference
from ..memory_outcome import MAX_POINTS, MemoryKind, MemoryOutcome, MemoryPoint, MemorySaved, MemoryTenant
from ..plan import Execution, OperatorEntry, Phase, Redistribution, ShardingPlan, SolverOutcome, TensorEntry
from .contradictions import Contradiction, Misspelt, check_decisions, check_record
from .defects import error_at, explain_defect
from .execution_order import Block, Loop, Run, check_execution, count_executed, parse_loop, unfold_execution
from .layer_relative import Frame, absolute_name, frame_of
from .layout_preserving import preserves_layout
from .migrate import MIGRATIONS, UnknownSection, migrate
from .name_patterns import parse_pattern
from .notation import (
    check_redistribution,
    check_tensor,
    parse_collective,
    parse_path,
    parse_strategy,
)
from .schema import (
    FORMAT_VERSION,
    AgainstSection,
    FollowerLine,
    LoopLine,
    MemorySection,
    PlanDocument,
    PointLine,
    RedistributionLine,
    RunLine,
    TensorLine,
)
from .yaml_text import Node, compose, of_another_kind, shorten

MAX_FILE_BYTES = 64 << 20
MAX_ENTRIES = 1_000_000
"""Entries after unfolding; 126 layers of 300 operators are 38,000."""
MAX_NAME_CHARS = 1 << 28
"""Characters of all names after unfolding."""


def parse_plan(text: str | bytes, source: str = "the plan file", *, edited: bool = False) -> ShardingPlan:
    """The plan a text describes; ``parse_plan(dump_plan(plan)) == plan``.

    Args:
        source: what errors call the text, usually its path.
        edited: read a file too in which layouts were edited by hand, so that its redistributions and bytes are still
            those of the plan before the edit; for ``autoshard replan`` and ``check``.

    Raises:
        PlanFileError: the text is not a whole, well-formed plan of this format version within the limits on its size,
            or it contradicts itself (:mod:`autoshard.plans.text.contradictions`). The message says where (line,
            section, key), what was found, what was expected and what to do.
    """
    decoded = _decode(text, source)
    try:
        document = compose(decoded, source)
    except PlanFileError as error:
        if "is not YAML" not in str(error) or "autoshard_plan:" in decoded:
            raise
        lacks = f"it has no line 'autoshard_plan: {FORMAT_VERSION}'"
        raise PlanFileError(f"{source} is no autoshard plan: {lacks} ({error})") from None
    current = _in_current_format(document, decoded, source)
    try:
        plan_document = PlanDocument.model_validate(current)
    except ValidationError as error:
        raise explain_defect(error, decoded, source) from None
    reader = _Reader(plan_document, decoded, source)
    plan = reader.plan()
    with reader.locating():
        check_record(plan)
    if not edited:
        with reader.locating("if a layout was edited by hand, `autoshard replan` makes the rest fit"):
            check_decisions(plan)
    return plan


def _decode(text: str | bytes, source: str) -> str:
    if len(text) > MAX_FILE_BYTES:
        raise PlanFileError(f"{source} is larger than the {MAX_FILE_BYTES >> 20} MiB a plan file may have")
    try:
        data = text.encode() if isinstance(text, str) else text
        return data.decode()
    except UnicodeError as error:
        raise PlanFileError(
            f"{source} is not UTF-8 text ({error}); it is damaged or no plan file, so make the plan again"
        ) from None


def _in_current_format(document: Node, text: str, source: str) -> Node:
    """The document, brought to the present format if it is of an older one."""
    version = document.get("autoshard_plan") if isinstance(document, dict) else None
    if not isinstance(document, dict) or version is None:
        kind = of_another_kind(document, "plan")
        lacks = f"it is {kind}; name a plan" if kind else f"it has no line 'autoshard_plan: {FORMAT_VERSION}'"
        raise PlanFileError(f"{source} is no autoshard plan: {lacks}")
    known = {str(number): number for number in (*MIGRATIONS, FORMAT_VERSION)}
    if not isinstance(version, str) or version not in known:
        raise PlanFileError(
            f"{source} says 'autoshard_plan: {shorten(str(version), 20)}', but this autoshard reads formats "
            f"{min(known.values())} to {max(known.values())}; use the autoshard that wrote it, or make the plan again"
        )
    try:
        return migrate(document, known[version])
    except UnknownSection as error:
        raise error_at(source, text, error.path, error) from None


def _point(line: PointLine) -> MemoryPoint:
    return MemoryPoint(line.phase, line.operator, line.bytes)


def _against(section: AgainstSection | None) -> ExpertDistance | None:
    if section is None:
        return None
    return ExpertDistance(
        section.expert,
        section.cost_ns,
        section.compute_s,
        section.communication_s,
        section.optimizer_s,
        section.peak_bytes,
        tuple(PartDifference(**line.model_dump()) for line in section.parts),
        tuple(TensorDifference(**line.model_dump()) for line in section.tensors),
    )


def _kinds(section: MemorySection) -> Iterator[MemoryKind]:
    points = sum(len(points) for line in section.timeline for points in line.values())
    for kind, sizes in section.kinds.items():
        yield MemoryKind(kind, sizes * points if len(sizes) == 1 else sizes)


def _timeline(section: MemorySection) -> Iterator[MemoryPoint]:
    if sum(len(points) for line in section.timeline for points in line.values()) > MAX_POINTS:
        raise ValueError(f"the timeline has more than {MAX_POINTS} points; it is no plan of autoshard")
    for line in section.timeline:
        for phase, points in line.items():
            yield from (MemoryPoint(phase, operator, size) for operator, size in points.items())


class _Reader:
    """Reads the notations inside a document whose shape is known to be right."""

    def __init__(self, document: PlanDocument, text: str, source: str) -> None:
        self.document = document
        self.text = text
        self.source = source
        self.entries = 0
        self.chars = 0
        self.lines: dict[tuple[str, Phase, tuple[Layout, ...]], int] = {}
        self.tensors: dict[str, tuple[str, str]] = {}
        with self._at("mesh"):
            self.mesh = Mesh.parse(document.mesh)
        with self._at("ranks"):
            self.mesh = replace(self.mesh, order=document.ranks)
        with self._at("network"):
            if document.network and tuple(document.network) != self.mesh.axes:
                raise ValueError(f"it must name the axes of the mesh in their order: {', '.join(self.mesh.axes)}")

    def plan(self) -> ShardingPlan:
        """The plan."""
        document, result = self.document, self.document.result
        plan = ShardingPlan(
            model=document.model,
            fingerprint=document.fingerprint,
            call=document.call,
            mesh=self.mesh,
            hardware=document.hardware.name,
            hardware_fingerprint=document.hardware.fingerprint,
            objective=document.objective,
            pins=document.pins,
            solver=SolverOutcome(
                result.status,
                result.cost_ns,
                result.bound_ns,
                result.gap,
                result.identical_layers,
                result.layer_groups,
            ),
            compute_s=result.compute_s,
            communication_s=result.communication_s,
            optimizer_s=result.optimizer_s,
            at_peak_s=result.at_peak_s,
            against=_against(result.against),
            parameters=tuple(self._tensors("parameters", document.parameters)),
            buffers=tuple(self._tensors("buffers", document.buffers)),
            inputs=tuple(self._tensors("inputs", document.inputs)),
            outputs=tuple(self._tensors("outputs", document.outputs)),
            operators=(*self._operators("forward"), *self._operators("backward")),
            redistributions=tuple(self._redistributions(document.redistributions)),
            memory=self._memory(document.memory),
            execution=(
                *self._execution("forward", document.execution.forward),
                *self._execution("backward", document.execution.backward),
            ),
            micro_batches=document.micro_batches,
            batch_dim=document.batch_dim,
            bucket_bytes=document.bucket_bytes,
            gathers_ahead=document.gathers_ahead,
            deferred=document.deferred,
            precision=Precision(document.param_dtype, document.reduce_dtype),
            contention=document.hardware.contention,
            network=tuple(document.network.values()),
        )
        self._check_totals(plan)
        with self._at("execution"):
            check_execution(plan.execution, plan.operators)
        return plan

    @contextmanager
    def _at(self, *path: str | int) -> Iterator[None]:
        """Adds the place in the file to what an inner check says."""
        try:
            yield
        except PlanFileError:
            raise
        except ValueError as error:
            raise error_at(self.source, self.text, path, error) from None

    @contextmanager
    def locating(self, advice: str = "") -> Iterator[None]:
        """Adds the place in the file, and what to do, to what a check of the whole plan says."""
        try:
            yield
        except Contradiction as error:
            path: list[str | int] = []
            for part in error.path:
                if isinstance(part, Redistribution):
                    path += ["redistributions", self.lines[part.tensor, part.phase, part.path]]
                elif isinstance(part, TensorEntry):
                    path += self.tensors[part.name]
                else:
                    path.append(part)
            said = f"{error}; {advice}" if advice and not isinstance(error, Misspelt) else error
            raise error_at(self.source, self.text, tuple(path), said) from None

    def _tensors(self, section: str, lines: Mapping[str, TensorLine]) -> Iterator[TensorEntry]:
        seen: set[str] = set()
        for key, line in lines.items():
            with self._at(section, key):
                names = self._names(key, line.count, seen)
                entry = TensorEntry(names[0], line.shape, line.dtype, parse_layout(line.layout, self.mesh))
                check_tensor(entry, self.mesh)
                self.tensors |= dict.fromkeys(names, (section, key))
                yield from (replace(entry, name=name) for name in names)

    def _operators(self, phase: Phase) -> Iterator[OperatorEntry]:
        seen: set[str] = set()
        for key, line in getattr(self.document.operators, phase).items():
            with self._at("operators", phase, key):
                (inputs, outputs), count = parse_strategy(line, self.mesh)
                for name in self._names(key, count, seen):
                    yield OperatorEntry(name, phase, inputs, outputs)
        for i, follower in enumerate(getattr(self.document.followers, phase)):
            with self._at("followers", phase, i):
                (inputs, outputs), _ = parse_strategy(follower.strategy, self.mesh)
                entry = OperatorEntry("", phase, inputs, outputs)
                if not preserves_layout(entry):
                    raise ValueError(
                        f"{follower.strategy!r} does not follow its first input; move the line to the section operators"
                    )
                for name in self._followers(follower, seen):
                    yield replace(entry, name=name)

    def _followers(self, line: FollowerLine, seen: set[str]) -> Iterator[str]:
        if line.count % len(line.roles):
            raise ValueError(f"the line counts {line.count}, which {len(line.roles)} roles do not divide")
        if "/" in line.module:
            raise ValueError(f"{line.module!r} is no module: it has a slash")
        for role in line.roles:
            yield from self._names(f"{line.module}/{role}", line.count // len(line.roles), seen)

    def _execution(self, phase: Phase, lines: Sequence[RunLine | LoopLine]) -> Iterator[Execution]:
        block = self._block(lines, "execution", phase)
        with self._at("execution", phase):
            self._count(count_executed(block), MAX_NAME_CHARS // MAX_ENTRIES)
            for name, ns in unfold_execution(block):
                yield Execution(name, phase, ns)

    def _block(self, lines: Sequence[RunLine | LoopLine], *path: str | int) -> Block:
        """The lines of an execution as loops and runs."""
        block: list[Run | Loop] = []
        for i, line in enumerate(lines):
            with self._at(*path, i):
                if len(line.root) != 1:
                    raise ValueError(f"it names {len(line.root)} modules or loops; write one per line")
                key = next(iter(line.root))
                if isinstance(line, RunLine):
                    roles = tuple((role, _nanoseconds(role, ms)) for role, ms in line.root[key].items())
                    block.append(Run(key, roles))
                else:
                    block.append(parse_loop(key, self._block(line.root[key], *path, i, key)))
        return tuple(block)

    def _redistributions(self, lines: Sequence[RedistributionLine]) -> Iterator[Redistribution]:
        seen: dict[tuple[Phase, tuple[Layout, ...]], set[str]] = {}
        for i, line in enumerate(lines):
            with self._at("redistributions", i):
                path = parse_path(line.path, self.mesh)
                collectives = tuple(parse_collective(text) for text in line.collectives)
                names = self._names(line.tensor, line.count, seen.setdefault((line.phase, path), set()))
                kept = line.kept == "true"
                shared = len(path) - 1 if kept and line.shared is None else line.shared or 0
                entry = Redistribution(names[0], line.phase, path, collectives, kept, shared=shared)
                check_redistribution(entry, self.mesh)
                for name in names:
                    self.lines[name, line.phase, path] = i
                    yield replace(entry, tensor=name, consumers=self._consumers(line.consumers, frame_of(name)))

    def _consumers(self, texts: Sequence[str], frame: Frame) -> tuple[str, ...]:
        consumers: list[str] = []
        for text in texts:
            pattern = parse_pattern(absolute_name(text, frame), self.document.repeats)
            self._count(pattern.count, len(text))
            consumers += pattern.names()
        return tuple(consumers)

    def _memory(self, section: MemorySection | None) -> MemoryOutcome | None:
        if section is None:
            return None
        static = section.static_bytes
        with self._at("memory"):
            return MemoryOutcome(
                optimizer=section.optimizer,
                budget_bytes=section.budget_bytes,
                soft_ms_per_gib=section.soft_ms_per_gib,
                allocator_margin=section.allocator_margin,
                parameter_bytes=static.parameters,
                gradient_bytes=static.gradients,
                optimizer_bytes=static.optimizer,
                buffer_bytes=static.buffers,
                input_bytes=static.inputs,
                peak=_point(section.peak),
                tenants=tuple(MemoryTenant(t.name, t.kind, t.count, t.bytes) for t in section.tenants),
                other_bytes=section.other_bytes,
                timeline=tuple(_timeline(section)),
                saved=tuple(MemorySaved(line.operator, line.bytes) for line in section.saved),
                kinds=tuple(_kinds(section)),
            )

    def _names(self, text: str, count: int, seen: set[str]) -> list[str]:
        """The names of a line, added to those seen.

        Raises:
            ValueError: the pattern cannot be read, names more or fewer than the line says, one seen before, or
                too many.
        """
        pattern = parse_pattern(text, self.document.repeats)
        if pattern.count != count:
            raise ValueError(f"the pattern names {pattern.count}, but the line counts {count}; make them agree")
        self._count(count, len(text))
        names = pattern.names()
        twice = seen.intersection(names)
        if twice:
            raise ValueError(f"{min(twice)!r} is named by an earlier line too; remove it from one of the two")
        seen.update(names)
        return names

    def _count(self, names: int, chars: int) -> None:
        self.entries += names
        self.chars += names * chars
        if self.entries > MAX_ENTRIES or self.chars > MAX_NAME_CHARS:
            raise ValueError(f"the file unfolds to more than {MAX_ENTRIES} entries; it is no plan")

    def _check_totals(self, plan: ShardingPlan) -> None:
        for section, expected in self.document.totals.model_dump().items():
            found = len(getattr(plan, section))
            if found != expected:
                with self._at("totals", section):
                    raise ValueError(
                        f"the section {section} has {found} entries, not {expected}; lines were lost or added, "
                        "so restore them or make the plan again"
                    )


def _nanoseconds(role: str, ms: Decimal) -> int:
    ns = ms.scaleb(6)
    if ns != int(ns):
        raise ValueError(f"{role} takes {ms} ms; a time has at most six digits after the point")
    return int(ns)
