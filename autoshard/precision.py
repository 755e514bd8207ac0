"""In which dtypes a step computes and reduces, as torch's FSDP2 has it (``MixedPrecisionPolicy``).

Parameters stay as they are. At the start of a step each is cast once: ``layers.0.wq/cast_weight`` is what the forward
and the backward read of ``layers.0.wq.weight``. A gradient is cast to the dtype in which it is reduced before that
(``to_reduce_weight``), and to the dtype of its parameter after that (``reduced_weight``), each where that is another.

    param_dtype  bfloat16, reduce_dtype float32      W -> cast_W (bf16) -> mm ... bwd.mm -> to_reduce_W (fp32) -> W
    param_dtype  bfloat16, reduce_dtype bfloat16     W -> cast_W (bf16) -> mm ... bwd.mm -> reduced_W (fp32) -> W
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

FloatingDtype = Literal["bfloat16", "float16", "float32", "float64"]
FLOATING_DTYPES: tuple[FloatingDtype, ...] = get_args(FloatingDtype)


@dataclass(frozen=True)
class Precision:
    """The dtype of parameters as the step reads them, and that in which their gradients are reduced; None where both
    are as they come.
    """

    param_dtype: FloatingDtype | None = None
    reduce_dtype: FloatingDtype | None = None

    @classmethod
    def of(cls, param_dtype: object = None, reduce_dtype: object = None) -> Precision:
        """What a user gives: ``"bfloat16"`` or ``torch.bfloat16``. Gradients alone are reduced as they are computed.

        Raises:
            ValueError: it is no floating dtype.
        """
        compute = _dtype("param_dtype", param_dtype)
        return cls(compute, _dtype("reduce_dtype", reduce_dtype) or compute)

    def __str__(self) -> str:
        """For example ``parameters as bfloat16, gradients reduced as float32``."""
        return f"parameters as {self.param_dtype or 'they are'}, gradients reduced as {self.reduce_dtype or 'they are'}"


AS_IT_IS = Precision()
CAST = "cast_"
"""Before the name of a parameter or input within its module: what it is cast to for the step."""


def cast_name(tensor: str) -> str:
    """The name of a parameter or input in the dtype that the step computes in."""
    return _within_module(tensor, CAST)


def is_cast(name: str) -> bool:
    """Whether an operator stands for a parameter or input in the dtype that the step computes in."""
    return name.rpartition("/")[2].startswith(CAST)


def to_reduce_name(parameter: str) -> str:
    """The name of a gradient in the dtype in which it is reduced, where it is computed in another."""
    return _within_module(parameter, "to_reduce_")


def reduced_name(parameter: str) -> str:
    """The name of a reduced gradient in the dtype of its parameter, where it was reduced in another."""
    return _within_module(parameter, "reduced_")


def _within_module(tensor: str, what: str) -> str:
    path, _, name = tensor.rpartition(".")
    return f"{path}/{what}{name}"


def _dtype(option: str, given: object) -> FloatingDtype | None:
    name = str(given).removeprefix("torch.")
    found = next((dtype for dtype in FLOATING_DTYPES if dtype == name), None)
    if given is not None and found is None:
        raise ValueError(f"unknown {option} {name!r}; choose one of {', '.join(FLOATING_DTYPES)}")
    return found
