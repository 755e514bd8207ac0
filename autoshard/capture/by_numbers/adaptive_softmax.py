"""``nn.AdaptiveLogSoftmaxWithLoss`` of all rows: torch's own computes a cluster of rare classes only of the rows whose
target is in it, and how many these are, numbers decide.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def adaptive_log_softmax(self: nn.AdaptiveLogSoftmaxWithLoss, input_: Tensor, target_: Tensor) -> Any:
    """What the module's forward gives for an input of shape (rows, features) and targets (rows,), or of one row.

    A target that is no class is no error: its row has the log-probability of the nearest class.
    """
    input, target = (input_, target_) if target_.dim() else (input_.unsqueeze(0), target_.unsqueeze(0))
    head = F.log_softmax(self.head(input), dim=1)
    found = head.gather(1, target.clamp(0, self.shortlist_size - 1).unsqueeze(1)).squeeze(1)
    for k, (low, high) in enumerate(pairwise(self.cutoffs)):
        within = F.log_softmax(self.tail[k](input), dim=1)
        rare = within.gather(1, (target - low).clamp(0, high - low - 1).unsqueeze(1)).squeeze(1)
        found = torch.where(target >= low, head[:, self.shortlist_size + k] + rare, found)
    output = found if target_.dim() else found.squeeze(0)
    return nn.modules.adaptive._ASMoutput(output, (-found).mean())
