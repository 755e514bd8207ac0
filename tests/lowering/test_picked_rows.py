"""Rows picked by their numbers, in the forms of published models: ``ddp`` gathers nothing for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autoshard

from ..thorough import some_thorough
from .as_before import check_as_before

ROWS, STEPS, FEW, WIDTH = 6, 5, 4, 3
arange = torch.arange


def _of_points(h: Tensor, i: Tensor) -> Tensor:
    """PointNet++, Point Transformer."""
    view, repeated = [len(h), *[1] * (i.dim() - 1)], [1, *i.shape[1:]]
    return h[arange(len(h), dtype=torch.long).view(view).repeat(repeated), i, :]


def _written(h: Tensor, i: Tensor) -> Tensor:
    h = h * 1.0
    h[arange(len(h)).repeat_interleave(FEW), i.sort(-1).indices.flatten()] = i.flatten()[:, None].to(h.dtype)
    return h


PICKED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "points": _of_points,
    "expanded": lambda h, i: h[arange(len(h))[:, None].expand(-1, FEW), i],
    "expanded as others": lambda h, i: h[arange(len(h))[:, None].expand_as(i), i],
    "in a row": lambda h, i: h[arange(len(h)).repeat_interleave(FEW), i.flatten()],
    "a copy elsewhere": lambda h, i: h[arange(len(h)).reshape(-1, 1).contiguous().to(i.device), i],
    "a grid": lambda h, i: h[torch.meshgrid(arange(len(h)), arange(FEW), indexing="ij")[0], i],
    "steps first": lambda h, i: h.transpose(0, 1)[i[:, 0], arange(len(h))],
    "matched": lambda h, i: (h[..., None] * h[:, :, None])[arange(len(h))[:, None], arange(FEW)[None], i % WIDTH],
    "written": _written,
}


class Picks(nn.Module):
    """A layer, of whose result some is picked."""

    def __init__(self, pick: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.pick = nn.Linear(WIDTH, WIDTH), pick

    def forward(self, x: Tensor, i: Tensor) -> Tensor:
        picked = self.pick(self.layer(x), i)
        return (picked * arange(picked.shape[-1])).square().mean()


@pytest.mark.parametrize("name", some_thorough(PICKED, {"expanded as others", "a copy elsewhere", "a grid"}))
def test_nothing_is_gathered(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, STEPS, WIDTH, dtype=torch.float64, generator=generator)
    args = x, torch.randint(-STEPS, STEPS, (ROWS, FEW), generator=generator)
    torch.manual_seed(0)
    model = Picks(PICKED[name]).double()
    plan = autoshard.plan(model, args, mesh="a=3", hardware="cpu-gloo", constraints=["baseline ddp"], cache=False)
    assert plan.pins == ("family a=ddp",)
    assert {each.kind for entry in plan.redistributions for each in entry.collectives} == {"all_reduce"}
    check_as_before(model, args, plan, rtol=1e-10, atol=1e-12)
