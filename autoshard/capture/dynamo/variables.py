"""What dynamo's variables stand for, and where it is."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from typing import Any

from torch._guards import TracingContext


def constant_of(variable: Any) -> Any:
    """The Python value of a constant of dynamo's; None of anything else."""
    value = variable.realize()
    return value.as_python_constant() if value.is_python_constant() else None


def dispatch_tables(kind: Any) -> Iterator[list[Any]]:
    """What dynamo does at each code of Python's, in each class that runs them."""
    for each in kind.__subclasses__():
        if "dispatch_table" in vars(each):
            yield each.dispatch_table
        yield from dispatch_tables(each)


def stack_here() -> str:
    """The frames of the model where dynamo is, as a traceback prints them."""
    return "".join(traceback.format_list(TracingContext.extract_stack()))
