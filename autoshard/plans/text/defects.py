"""What is wrong with a plan file, as a sentence with its place."""

from __future__ import annotations

from pydantic import BaseModel, ValidationError

from ...errors import PlanFileError
from .schema import (
    ExecutionSection,
    FollowerLine,
    FollowersSection,
    HardwareSection,
    MemorySection,
    OperatorsSection,
    PlanDocument,
    RedistributionLine,
    ResultSection,
    TensorLine,
    TotalsSection,
)
from .yaml_text import Path, line_of, shorten

_EXPECTED = {
    "tuple_type": "expected a list, for example [256, 64], or [] for none",
    "dict_type": "expected one line per name, or {} for none",
    "model_type": "expected a mapping, for example {name: value}",
    "model_attributes_type": "expected a mapping, for example {name: value}",
    "string_type": "expected a text",
    "int_parsing": "expected a whole number",
    "int_type": "expected a whole number",
    "float_parsing": "expected a number",
    "decimal_parsing": "expected a number of milliseconds",
    "too_short": "expected at least one entry",
    "float_type": "expected a number",
}


def explain_defect(error: ValidationError, text: str, source: str) -> PlanFileError:
    """The error to raise for a file that pydantic refused: its first defect in one sentence, with the line.

    A misspelt key is both unknown and missing; the sentence is then about the misspelt one.
    """
    defects = error.errors(include_url=False)
    first = next((defect for defect in defects if defect["type"] == "extra_forbidden"), defects[0])
    path: Path = tuple(part for part in first["loc"] if part not in ("[key]", "[run]", "[loop]"))
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
    return error_at(source, text, path, said)


def _known(path: Path) -> str:
    """The keys that the section at this place may have."""
    sections: dict[str | int, type[BaseModel]] = {
        "hardware": HardwareSection,
        "result": ResultSection,
        "operators": OperatorsSection,
        "totals": TotalsSection,
        "redistributions": RedistributionLine,
        "memory": MemorySection,
        "followers": FollowersSection if len(path) == 1 else FollowerLine,
        "execution": ExecutionSection,
    }
    model = sections.get(path[0], TensorLine) if path else PlanDocument
    return ", ".join(field.alias or name for name, field in model.model_fields.items())


def error_at(source: str, text: str, path: Path, said: object) -> PlanFileError:
    """An error with the line and the keys that lead to it."""
    line = line_of(text, path)
    place = f"{source}, line {line}" if line else source
    where = ", ".join(f"entry {part + 1}" if isinstance(part, int) else part for part in path)
    return PlanFileError(f"{place}: {where + ': ' if where else ''}{shorten(str(said))}")
