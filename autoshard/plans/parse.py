"""The text of a plan file as a plan. The file is data from anywhere: every defect ends in one kind of error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from pydantic import BaseModel, ValidationError

from ..errors import PlanFileError
from ..layout import Layout, parse_layout
from ..mesh import Mesh
from .folding import parse_pattern
from .memory import MemoryOutcome, MemoryPoint, MemoryTenant
from .notation import (
    check_redistribution,
    check_tensor,
    parse_collective,
    parse_path,
    parse_strategy,
)
from .plan import OperatorEntry, Phase, Redistribution, ShardingPlan, SolverOutcome, TensorEntry
from .schema import (
    FORMAT_VERSION,
    READABLE_VERSIONS,
    HardwareSection,
    MemorySection,
    OperatorsSection,
    PlanDocument,
    PointLine,
    RedistributionLine,
    ResultSection,
    TensorLine,
    TotalsSection,
)
from .yaml_text import Node, Path, compose, line_of, shorten

MAX_FILE_BYTES = 64 << 20
MAX_ENTRIES = 1_000_000
"""Entries after unfolding; 126 layers of 300 operators are 38,000."""
MAX_NAME_CHARS = 1 << 28
"""Characters of all names after unfolding."""


_EXPECTED = {
    "tuple_type": "expected a list, for example [256, 64], or [] for none",
    "dict_type": "expected one line per name, or {} for none",
    "model_type": "expected a mapping, for example {name: value}",
    "model_attributes_type": "expected a mapping, for example {name: value}",
    "string_type": "expected a text",
    "int_parsing": "expected a whole number",
    "int_type": "expected a whole number",
    "float_parsing": "expected a number",
    "float_type": "expected a number",
}


def parse_plan(text: str | bytes, source: str = "the plan file") -> ShardingPlan:
    """The plan a text describes; ``parse_plan(dump_plan(plan)) == plan``.

    ``source`` is what errors call the text, usually its path.

    Raises:
        PlanFileError: the text is not a whole, well-formed plan of this format version within the limits on its size.
            The message says where (line, section, key), what was found, what was expected and what to do.
    """
    decoded = _decode(text, source)
    document = compose(decoded, source)
    _check_version(document, source)
    try:
        plan_document = PlanDocument.model_validate(document)
    except ValidationError as error:
        raise _explain(error, decoded, document, source) from None
    return _Reader(plan_document, decoded, source).plan()


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


def _check_version(document: Node, source: str) -> None:
    version = document.get("autoshard_plan") if isinstance(document, dict) else None
    if version is None:
        raise PlanFileError(f"{source} is no autoshard plan: it has no line 'autoshard_plan: {FORMAT_VERSION}'")
    if version not in [str(known) for known in READABLE_VERSIONS]:
        raise PlanFileError(
            f"{source} says 'autoshard_plan: {shorten(str(version), 20)}', but this autoshard reads formats "
            f"{' and '.join(map(str, READABLE_VERSIONS))}; use the autoshard that wrote it, or make the plan again"
        )


def _explain(error: ValidationError, text: str, document: Node, source: str) -> PlanFileError:
    """The first defect pydantic found, as a sentence with its place; a misspelt key goes before the missing one."""
    defects = error.errors(include_url=False)
    first = next((defect for defect in defects if defect["type"] == "extra_forbidden"), defects[0])
    path: Path = tuple(part for part in first["loc"] if part != "[key]")
    if first["type"] == "missing":
        said = f"{path[-1]!r} is missing; if the file was cut short, make the plan again"
        path = path[:-1]
    elif first["type"] == "extra_forbidden":
        said = f"{path[-1]!r} is not known here; expected {_known(path[:-1])}"
    else:
        found = first["input"]
        shown = (
            shorten(repr(found)) if isinstance(found, str) else f"a {'list' if isinstance(found, list) else 'mapping'}"
        )
        message = first["msg"]
        said = f"found {shown}; {_EXPECTED.get(first['type'], message[:1].lower() + message[1:])}"
    return _error(source, text, path, said)


def _known(path: Path) -> str:
    """The keys a section may have."""
    sections: dict[str | int, type[BaseModel]] = {
        "hardware": HardwareSection,
        "result": ResultSection,
        "operators": OperatorsSection,
        "totals": TotalsSection,
        "redistributions": RedistributionLine,
        "memory": MemorySection,
    }
    model = sections.get(path[0], TensorLine) if path else PlanDocument
    return ", ".join(model.model_fields)


def _error(source: str, text: str, path: Path, said: object) -> PlanFileError:
    line = line_of(text, path)
    place = f"{source}, line {line}" if line else source
    where = ", ".join(f"entry {part + 1}" if isinstance(part, int) else part for part in path)
    return PlanFileError(f"{place}: {where + ': ' if where else ''}{shorten(str(said))}")


def _point(line: PointLine) -> MemoryPoint:
    return MemoryPoint(line.phase, line.operator, line.bytes)


class _Reader:
    """Reads the notations inside a document whose shape is known to be right."""

    def __init__(self, document: PlanDocument, text: str, source: str) -> None:
        self.document = document
        self.text = text
        self.source = source
        self.entries = 0
        self.chars = 0
        with self._at("mesh"):
            self.mesh = Mesh.parse(document.mesh)

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
            solver=SolverOutcome(result.status, result.cost_ns, result.bound_ns, result.gap),
            compute_s=result.compute_s,
            communication_s=result.communication_s,
            parameters=tuple(self._tensors("parameters", document.parameters)),
            buffers=tuple(self._tensors("buffers", document.buffers)),
            inputs=tuple(self._tensors("inputs", document.inputs)),
            outputs=tuple(self._tensors("outputs", document.outputs)),
            operators=(
                *self._operators("forward", document.operators.forward),
                *self._operators("backward", document.operators.backward),
            ),
            redistributions=tuple(self._redistributions(document.redistributions)),
            memory=self._memory(document.memory),
        )
        self._check_totals(plan)
        return plan

    @contextmanager
    def _at(self, *path: str | int) -> Iterator[None]:
        """Adds the place in the file to what an inner check says."""
        try:
            yield
        except PlanFileError:
            raise
        except ValueError as error:
            raise _error(self.source, self.text, path, error) from None

    def _tensors(self, section: str, lines: Mapping[str, TensorLine]) -> Iterator[TensorEntry]:
        seen: set[str] = set()
        for key, line in lines.items():
            with self._at(section, key):
                names = self._names(key, line.count, seen)
                entry = TensorEntry(names[0], line.shape, line.dtype, parse_layout(line.layout, self.mesh))
                check_tensor(entry, self.mesh)
                yield from (replace(entry, name=name) for name in names)

    def _operators(self, phase: Phase, lines: Mapping[str, str]) -> Iterator[OperatorEntry]:
        seen: set[str] = set()
        for key, line in lines.items():
            with self._at("operators", phase, key):
                (inputs, outputs), count = parse_strategy(line, self.mesh)
                for name in self._names(key, count, seen):
                    yield OperatorEntry(name, phase, inputs, outputs)

    def _redistributions(self, lines: Sequence[RedistributionLine]) -> Iterator[Redistribution]:
        seen: dict[tuple[Phase, tuple[Layout, ...]], set[str]] = {}
        for i, line in enumerate(lines):
            with self._at("redistributions", i):
                path = parse_path(line.path, self.mesh)
                collectives = tuple(parse_collective(text) for text in line.collectives)
                names = self._names(line.tensor, line.count, seen.setdefault((line.phase, path), set()))
                entry = Redistribution(names[0], line.phase, path, collectives, line.kept == "true")
                check_redistribution(entry, self.mesh)
                yield from (replace(entry, tensor=name) for name in names)

    def _memory(self, section: MemorySection | None) -> MemoryOutcome | None:
        if section is None:
            return None
        static = section.static_bytes
        with self._at("memory"):
            if self.document.autoshard_plan == "1":
                raise ValueError("a plan of format 1 has none; write autoshard_plan: 2")
            return MemoryOutcome(
                optimizer=section.optimizer,
                budget_bytes=section.budget_bytes,
                soft_ms_per_gib=section.soft_ms_per_gib,
                parameter_bytes=static.parameters,
                gradient_bytes=static.gradients,
                optimizer_bytes=static.optimizer,
                buffer_bytes=static.buffers,
                input_bytes=static.inputs,
                peak=_point(section.peak),
                tenants=tuple(MemoryTenant(t.name, t.kind, t.count, t.bytes) for t in section.tenants),
                other_bytes=section.other_bytes,
                timeline=tuple(_point(line) for line in section.timeline),
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
        self.entries += count
        self.chars += count * len(text)
        if self.entries > MAX_ENTRIES or self.chars > MAX_NAME_CHARS:
            raise ValueError(f"the file unfolds to more than {MAX_ENTRIES} entries; it is no plan")
        names = pattern.names()
        twice = seen.intersection(names)
        if twice:
            raise ValueError(f"{min(twice)!r} is named by an earlier line too; remove it from one of the two")
        seen.update(names)
        return names

    def _check_totals(self, plan: ShardingPlan) -> None:
        for section, expected in self.document.totals.model_dump().items():
            found = len(getattr(plan, section))
            if found != expected:
                with self._at("totals", section):
                    raise ValueError(
                        f"the section {section} has {found} entries, not {expected}; lines were lost or added, "
                        "so restore them or make the plan again"
                    )
