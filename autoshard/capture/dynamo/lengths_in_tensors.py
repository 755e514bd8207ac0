"""``F.ctc_loss`` with lengths that Python has: as with tensors of these. Torch runs it by other operators then, which
look at the targets, where there are no numbers while a forward is traced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.variables import ListVariable, TorchInGraphFunctionVariable, TupleVariable, UserFunctionVariable
from torch._dynamo.variables.builder import wrap_fx_proxy

from .numbers_as_indices import in_tensor

_LENGTHS = {2: "input_lengths", 3: "target_lengths"}
"""Which of its arguments they are."""


@contextmanager
def lengths_in_tensors() -> Iterator[None]:
    """Writes such lengths down."""
    call = TorchInGraphFunctionVariable.call_function

    def written(tx: Any, given: Any) -> Any:
        if not isinstance(given, ListVariable | TupleVariable):
            return given
        if not given.is_python_constant():
            return UserFunctionVariable(cast(FunctionType, _stacked)).call_function(tx, [given], {})
        lengths = tx.output.create_proxy("call_function", torch.tensor, (list(given.as_python_constant()),), {})
        return wrap_fx_proxy(tx, lengths)

    def call_with_tensors(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.value in (F.ctc_loss, torch.ctc_loss):
            args = [written(tx, each) if k in _LENGTHS else each for k, each in enumerate(args)]
            kwargs = {key: written(tx, each) if key in _LENGTHS.values() else each for key, each in kwargs.items()}
        return call(self, tx, args, kwargs)

    with patch.object(TorchInGraphFunctionVariable, "call_function", call_with_tensors):
        yield


def _stacked(lengths: Sequence[int]) -> Tensor:
    """Lengths of which some are taken out of tensors."""
    return torch.stack([in_tensor(length) for length in lengths])
