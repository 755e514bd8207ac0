"""The loss of connectionist temporal classification on ranks: losses and gradients as in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autoshard
from autoshard.capture import capture
from autoshard.errors import CaptureError
from autoshard.layout import Layout, S
from autoshard.mesh import Mesh

from ..fuzz.random_plans import random_plan
from ..thorough import some_thorough
from .as_before import check_as_before

ROWS, STEPS, FEATURES, CLASSES = 4, 12, 8, 6
TARGETS = torch.tensor([[1, 2, 2, 3], [4, 1, 5, 5], [3, 3, 1, 2], [5, 4, 1, 1]])
LENGTHS = torch.tensor([4, 2, 0, 3])
ENDS = torch.tensor([12, 9, 12, 7])
PADDED = TARGETS.where(torch.arange(4) < LENGTHS.unsqueeze(1), -100)
SCATTERED = TARGETS.where(torch.tensor([[1, 0, 1, 0], [0, 0, 1, 1], [1, 1, 1, 0], [0, 1, 1, 1]]).bool(), -100)
ONE_BEHIND_ANOTHER = PADDED[PADDED >= 0]
Loss = Callable[..., Tensor]


class Recognizer(nn.Module):
    """Features (rows, steps, features) to a loss of the log-probabilities (steps, rows, classes)."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.features, self.classes, self.loss = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES), loss

    def forward(self, x: Tensor, targets: Tensor, ends: Tensor, lengths: Tensor) -> Tensor:
        scores = self.classes(torch.relu(self.features(x)))
        return self.loss(scores.log_softmax(-1).transpose(0, 1), targets, ends, lengths)


def _masked(log_probs: Tensor, labels: Tensor, ends: Tensor, lengths: Tensor) -> Tensor:
    """As transformers has it."""
    mask = labels >= 0
    with torch.backends.cudnn.flags(enabled=False):
        return F.ctc_loss(log_probs, labels.masked_select(mask), ends, mask.sum(-1), blank=0, zero_infinity=True)


def _checked(log_probs: Tensor, labels: Tensor, ends: Tensor, lengths: Tensor) -> Tensor:
    if labels.max() >= log_probs.shape[-1]:
        raise ValueError(f"labels must be below {log_probs.shape[-1]}")
    return F.ctc_loss(log_probs, labels[labels >= 0], ends, lengths, reduction="sum")


LOSSES: dict[str, tuple[Loss, Tensor]] = {
    "padded": (F.ctc_loss, TARGETS),
    "module": (nn.CTCLoss(blank=0, reduction="sum"), TARGETS),
    "last class is blank": (lambda *given: F.ctc_loss(*given, blank=CLASSES - 1), TARGETS.clamp(max=4) - 1),
    "32 bits": (lambda x, *given: F.ctc_loss(x, *(each.int() for each in given)), TARGETS),
    "each row": (lambda *given: F.ctc_loss(*given, reduction="none").square().sum(), TARGETS),
    "no alignment": (
        lambda x, y, ends, lengths: F.ctc_loss(x[:5], y, ends.clamp(max=5), lengths, zero_infinity=True),
        TARGETS,
    ),
    "one behind another": (F.ctc_loss, ONE_BEHIND_ANOTHER),
    "longer than there are steps": (
        lambda x, y, *given: F.ctc_loss(x[:2], y, given[0].clamp(max=2), given[1], zero_infinity=True),
        ONE_BEHIND_ANOTHER,
    ),
    "lengths of Python's": (
        lambda x, y, *given: F.ctc_loss(x, y, (STEPS,) * ROWS, target_lengths=[2, 3, 1, 2]),
        TARGETS,
    ),
    "lengths of Python's, one behind another": (
        lambda x, y, *given: F.ctc_loss(x, y, [STEPS] * ROWS, (4, 2, 0, 3)),
        ONE_BEHIND_ANOTHER,
    ),
    "lengths in lists": (
        lambda x, y, ends, lengths: F.ctc_loss(x, y, ends.tolist(), tuple(int(length) for length in lengths)),
        TARGETS,
    ),
    "in a checkpoint": (lambda *given: checkpoint(F.ctc_loss, *given, use_reentrant=False), TARGETS),
    "a row alone": (lambda x, y, ends, lengths: F.ctc_loss(x[:, 1], y[1, :2], ends[1], lengths[1]), TARGETS),
    "masked": (_masked, PADDED),
    "masked between": (_masked, SCATTERED),
    "masked and checked": (_checked, PADDED),
}
CASES = [(name, seed) for seed in range(3) for name in LOSSES]


@pytest.mark.parametrize(("name", "seed"), some_thorough(CASES, CASES[len(LOSSES) :]))
@pytest.mark.filterwarnings("ignore::autoshard.errors.StrategyWarning")
def test_losses_and_gradients_are_those_of_one_process(name: str, seed: int) -> None:
    loss, targets = LOSSES[name]
    model, args = Recognizer(loss).double(), _given(targets)
    plan = random_plan(capture(model, args), Mesh(("dp", "tp"), (2, 2)), seed, model, args, {})
    check_as_before(model, args, plan, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["padded", "masked"])
def test_data_parallel_training_cuts_the_batch(name: str) -> None:
    loss, targets = LOSSES[name]
    model, args = Recognizer(loss).double(), _given(targets)
    plan = autoshard.plan(model, args, mesh="dp=2", hardware="cpu-gloo", constraints="baseline ddp")
    of_loss = next(each for each in plan.operators if each.name == "/ctc")
    assert of_loss.outputs == (Layout((S(0),)),) * 2
    check_as_before(model, args, plan, rtol=1e-9, atol=1e-9)


def test_half_precision_is_refused_as_by_torch() -> None:
    model, args = Recognizer(F.ctc_loss).bfloat16(), _given(TARGETS, torch.bfloat16)
    with pytest.raises(
        CaptureError, match=r"ctc_loss takes log-probabilities in float32 or float64, not torch\.bfloat16"
    ):
        capture(model, args)


def _given(targets: Tensor, dtype: torch.dtype = torch.float64) -> tuple[Any, ...]:
    x = torch.randn(ROWS, STEPS, FEATURES, dtype=dtype, generator=torch.Generator().manual_seed(1))
    return x, targets, ENDS, LENGTHS
