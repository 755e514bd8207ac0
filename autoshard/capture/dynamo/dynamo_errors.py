"""What dynamo's errors say of a model."""

from __future__ import annotations

import ast
import re
import traceback

from torch._dynamo.exc import ObservedException, ObservedKeyError, TorchRuntimeError, Unsupported
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

BACKWARD_OF = "Error detected in "
"""Begins what torch says, in a note of such an error, of where the forward calls what fails in its backward."""
# How dynamo prints the argument of an exception, and a name that Python would not find either.
_CONSTANT = re.compile(r"ConstantVariable\(str: (.*)\)", re.DOTALL)
_CLASS_ALONE = re.compile(r"ExceptionVariable\(<class '(?:builtins\.)?(.*)'>\)")  # torch 2.11, of the model's own
_WITH_CLASS = re.compile(r"\w+(\(|:|$)")
_NO_NAME = re.compile(r"Failed to find name `(\w+)` in frame's builtins")
# What the first line of an error says where numbers in a tensor would decide.
_ON_NUMBERS = re.compile(
    r"data[- ]dependent (expression|branching|operator|output)|Tensor\.tolist\(\) with|Pending unbacked symbols",
    re.IGNORECASE,
)
# of ``x[:, k]`` by a number out of a tensor, of an argument that is one, and of a list that is sorted or given to numpy
_AS_ARGUMENT = re.compile(
    r"valid indices \(got SymInt\)|must be \w+, not Sym(Int|Float|Bool)\b|failed to convert [^\n]*\bz?u\d+\b"
    r"|non-constant key type: <class '(int|float|torch\.Tensor)'>"
)

# of ``experts[f"expert_{k}"]`` and ``getattr(self, f"expert_{k}")``: an error that says no more than the text asked for
_IN_TEXT = r"StringFormatVariable\(.*(Tensor|SymNode)Variable\(\)"
_AS_NAME = re.compile(
    rf"^(getattr\(\) with non-constant name argument|Dynamo cannot determine whether the underlying object is hashable)"
    rf".*{_IN_TEXT}",  # the latter in torch 2.11
    re.DOTALL,
)
_AS_KEY = re.compile(rf"{_IN_TEXT}|raised exception KeyError\('[^']*Tensor\(shape=\(\), ")  # as it is, and once caught


def model_stack(error: Exception) -> str:
    """The frames of the model in which dynamo met an error, as a traceback prints them; empty for other errors."""
    return "".join(traceback.format_list(getattr(error, "real_stack", None) or []))


def backward_stack(error: Exception) -> str:
    """The frames in which the forward calls what raises an error in its backward; empty for other errors."""
    return "".join(note for note in getattr(error, "__notes__", ()) if note.startswith(BACKWARD_OF))


def depends_on_numbers(error: Exception) -> bool:
    """Whether a shape, or the way that Python goes, depends on numbers in a tensor, which a traced forward has not."""
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        return True
    text, cause = str(error), error.__cause__
    if isinstance(cause, ObservedException):  # the model's own
        return isinstance(cause, ObservedKeyError) and _AS_KEY.match(str(cause)) is not None
    return _ON_NUMBERS.search(text.partition("\n")[0]) is not None or any(
        said.search(text) for said in (_AS_ARGUMENT, _AS_NAME)
    )


def is_explained(error: Exception) -> bool:
    """Whether torch's message says what is wrong with the model; the traceback of its own frames adds nothing then."""
    known = (Unsupported, TorchRuntimeError, DataDependentOutputException, DynamicOutputShapeException)
    return isinstance(error, known)


def own_error(error: Exception) -> str | None:
    """The exception that the model itself would raise without dynamo, ``ValueError: 3 heads``; None where dynamo alone
    cannot follow the model.
    """
    if isinstance(error, TorchRuntimeError):  # an operator refused its arguments
        origin: BaseException | None = error
        while isinstance(origin, TorchRuntimeError | Unsupported):
            origin = origin.__cause__ or origin.__context__
        return None if origin is None else f"{type(origin).__name__}: {origin}"
    if isinstance(error.__cause__, ObservedException):  # a raise in Python that nothing catches
        kind = type(error.__cause__).__name__.removeprefix("Observed").removesuffix("Error") + "Error"
        said = str(error.__cause__).removeprefix("raised exception ")
        if constant := _CONSTANT.fullmatch(said):
            return f"{kind.replace('ErrorError', 'Error')}: {ast.literal_eval(constant[1])}"
        if known := _CLASS_ALONE.fullmatch(said):
            return known[1]
        return said if _WITH_CLASS.match(said) else f"{kind}: {said}"
    text = str(error)
    if isinstance(error, Unsupported) and (name := _NO_NAME.search(text)):
        return f"NameError: name '{name[1]}' is not defined"
    if isinstance(error, Unsupported) and "assertion failed" in text.partition("\n")[0] and "ConstantVariable" in text:
        return "AssertionError"
    return None
