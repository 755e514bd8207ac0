"""Whether a forward that is traced is told that it is: one process runs a model as its Python is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from ..lines import is_models_file

# The ways of asking that dynamo answers with True; torch._dynamo.is_compiling is one of these by another name.
_ASKING = (
    torch.compiler.is_compiling,
    torch.compiler.is_dynamo_compiling,
    torch.compiler.is_exporting,
    torch._dynamo.external_utils.is_compiling,
    torch._utils.is_compiling,
)


class Asked:
    """Whether the model's own code has asked if it is compiled."""

    def __init__(self) -> None:
        self.is_so = False


@contextmanager
def as_in_one_process(asked: Asked) -> Iterator[None]:
    """Has ``torch.compiler.is_compiling()`` and the like be false where the model's own code asks. Torch's code is told
    the truth: it takes what cannot be traced out of the way where it is traced.
    """
    call = TorchInGraphFunctionVariable.call_function

    def unless_asked(self: Any, tx: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self.value in _ASKING and is_models_file(tx.f_code.co_filename):
            asked.is_so = True
            return ConstantVariable.create(False)
        return call(self, tx, args, kwargs)  # type: ignore[arg-type]

    with patch.object(TorchInGraphFunctionVariable, "call_function", unless_asked):
        yield
