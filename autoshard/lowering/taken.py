"""Parameters of a model that was taken apart, in the hands of an optimizer that was made before."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import InputError

_MARK = "_autoshard_taken_from"


def mark_taken(parameter: nn.Parameter, name: str) -> None:
    """From here on, an optimizer that steps a parameter says that nothing trains it any more.

    ``name`` is the one it had in its model, where a DTensor has taken its place.
    """
    setattr(parameter, _MARK, name)
    _refuse_steps()


def check_untaken(model: nn.Module) -> None:
    """Checks that no other model has lost a parameter to which this one holds on, which each would train by itself.

    Raises:
        InputError: one has.
    """
    for name, parameter in model.named_parameters():
        if there := getattr(parameter, _MARK, None):
            raise InputError(
                f"the parameter {name} is one ({there}) of a model that was parallelized before, where a DTensor has "
                "taken its place, so the two would be trained apart; put both models into one module, and plan and "
                "parallelize that"
            )


@cache
def _refuse_steps() -> None:
    def check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if name := getattr(parameter, _MARK, None):
                    raise InputError(
                        f"the optimizer holds the parameter {name} as it was before its model was parallelized, so a "
                        "step would train nothing; make the optimizer from the parameters of the parallel module"
                    )

    register_optimizer_step_pre_hook(check)
