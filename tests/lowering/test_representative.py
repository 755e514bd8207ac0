"""Forwards that go by numbers of arguments which decide the same in every step, against one process."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autoshard
from autoshard.capture import capture, model_key
from autoshard.errors import CaptureError
from autoshard.mesh import Mesh

from ..fuzz.judge import capturing_once
from ..fuzz.random_plans import random_plan
from ..fuzz.ranks import PeerFailed, run_ranks
from ..thorough import some_thorough
from .as_before import check_as_before, steps

pytestmark = pytest.mark.filterwarnings("ignore:.* mixes it")  # what goes over all rows
ROWS, WORDS = 4, 6
Body = Callable[[Tensor, Tensor, Tensor], Tensor]


class Around(nn.Module):
    """A layer for a body that takes features (rows, words, 8), a mask (rows, words) and five numbers."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.enter, self.body = nn.Linear(8, 8), body

    def forward(self, x: Tensor, mask: Tensor, numbers: Tensor) -> Tensor:
        return self.body(self.enter(x), mask, numbers)


def put_back(x: Tensor, m: Tensor, n: Tensor) -> Tensor:
    made = x.tanh().clone()
    made[m] = x[m].flip(1)
    return made.square().mean()


def put_into_rows(x: Tensor, m: Tensor, n: Tensor) -> Tensor:
    """Qwen-VL writes the positions of the words of each row that are no padding."""
    places, made = x.new_zeros(3, ROWS, WORDS), x.tanh().mT.clone()
    for row, real in enumerate(m):
        places[:, row, real] = torch.arange(int(real.sum())).expand(3, -1).to(x)
        made[row, 2:6:2, real] = x[row, real][:, :2].mT.flip(0) + x[row][real].mT[:2]
    made[:, 0, m[0]] = x[:, :3, 0]
    return (made * places.sum(0)[:, None]).square().mean()


def row_by_row(x: Tensor, m: Tensor, n: Tensor) -> Tensor:
    """PaddleOCR-VL does so behind a view."""
    made, places = x.tanh().clone(), torch.zeros(2, 3, ROWS, WORDS, dtype=x.dtype)
    for row in range(ROWS):
        made[row, m[row]] = x[row, m[row]].flip(0)
        places[:, 1:][:, :, row, m[row]] = x[row, :3, :3].expand(2, 2, 3, 3)[:, :, 1]
    return made.square().mean() + places.cumsum(-1).square().mean()


def real_pictures(x: Tensor, m: Tensor, n: Tensor) -> Tensor:
    """Idefics and SmolVLM leave out pictures that are nothing but padding, and there are none."""
    is_real = (m == 0).sum(dim=1) != WORDS
    return x[is_real].cumsum(1).square().mean()


def ways(x: Tensor, m: Tensor, n: Tensor) -> Tensor:
    if n.sum() > 100:
        x = x * 5
    if not m[:, 0].any():
        x = x * 3
    if n[0]:
        x = x.tanh()
    return x.square().mean()


def written_later(x: Tensor, m: Tensor, n: Tensor) -> Tensor:
    n = n.clone()
    length = int(n[1])
    n.zero_()
    return x[:, :length].square().mean() + n.sum()


def both_sides(x: Tensor, m: Tensor, n: Tensor) -> Tensor:
    picked, others = x[m].view(ROWS, -1, 8), x[~m].view(ROWS, -1, 8)
    return torch.einsum("bid,bjd->bij", picked, others).softmax(-1).square().mean()


def groups(x: Tensor, m: Tensor, n: Tensor) -> Tensor:
    """Qwen-VL goes through runs of tokens of one kind."""
    found: Tensor = x[:, :0].sum()
    for size, run in itertools.groupby(enumerate(n.tolist()), lambda pair: pair[1]):
        found = found + x[:, next(run)[0] :].sum(1).square().mean() * size
    return found


BODIES: dict[str, Body] = {
    "as many of each row": lambda x, m, n: x[m].reshape(ROWS, -1, 8).cumsum(1).square().mean(),
    "both sides of a mask": both_sides,
    "all rows": real_pictures,
    "in all": lambda x, m, n: x[m & (torch.arange(WORDS) < 4)][::2].cumsum(0).square().mean(),
    "places": lambda x, m, n: x[torch.where(m)].flip(0)[:5].square().mean() + m.nonzero()[:7].sum(),
    "places of a dim": lambda x, m, n: x[:, torch.where(m[0])[0]].square().mean(),
    "elements": lambda x, m, n: x[..., 0].masked_select(m).view(ROWS, -1).cumsum(1).mean(),
    "put back": put_back,
    "put into rows": put_into_rows,
    "row by row": row_by_row,
    "groups": groups,
    "how many alone": lambda x, m, n: x[:, : len(m.nonzero()) // ROWS].square().mean(),
    "a length": lambda x, m, n: x[:, : int(n.max())].square().mean() + x[:, : n[1]].mean(),
    "ways": ways,
    "written later": written_later,
    "lengths": lambda x, m, n: sum(part.mean() ** 2 for part in x.split((n // 2).tolist(), 1)),
    "repeated": lambda x, m, n: x[:, :5].repeat_interleave(n, dim=1).cumsum(1).square().mean(),
}
ALIKE = {"places of a dim", "elements", "groups", "lengths", "as many of each row"}
"""Bodies that are looked at in `make test-all`: of each, another one is much like it."""


def example(body: Body, seed: int = 0) -> tuple[nn.Module, tuple[Tensor, Tensor, Tensor]]:
    """A mask that picks three words of each row, others for another seed; the numbers are the same for all."""
    torch.manual_seed(seed)
    mask = torch.zeros(ROWS, WORDS, dtype=torch.bool)
    mask[:, 0] = True
    mask[:, 1:5] = torch.stack([torch.randperm(4) < 2 for _ in range(ROWS)])
    x = torch.randn(ROWS, WORDS, 8, dtype=torch.float64)
    torch.manual_seed(0)
    return Around(body).double(), (x, mask, torch.tensor([3, 4, 2, 3, 2]))


def marked(args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return args[0], *map(autoshard.representative, args[1:])


@pytest.mark.parametrize("name", some_thorough(BODIES, ALIKE))
def test_steps_that_decide_the_same_are_those_of_one_process(name: str) -> None:
    model, args = example(BODIES[name])
    with pytest.raises(CaptureError, match=r"autoshard\.representative"):
        capture(model, args)
    args = marked(args)
    plan = autoshard.plan(model, args, mesh="a=2", hardware="cpu-gloo", constraints=["baseline ddp"])
    check_as_before(model, args, plan, rtol=1e-8, atol=1e-10)
    if name not in ("in all", "places of a dim"):  # of which other masks pick another number
        check_as_before(model, args, plan, rtol=1e-8, atol=1e-10, batch=example(BODIES[name], 1)[1])


@pytest.mark.parametrize(
    "name",
    some_thorough(BODIES, ALIKE | {"a length", "all rows", "how many alone", "put back", "repeated"}),
)
def test_whatever_is_cut(name: str) -> None:
    model, args = example(BODIES[name])
    args = marked(args)
    plan = random_plan(capture(model, args), Mesh.parse("a=2,b=2"), 0, model, args, {})
    check_as_before(model, args, plan, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", some_thorough(BODIES, ALIKE))
def test_a_step_that_decides_otherwise_says_so(name: str) -> None:
    model, args = example(BODIES[name])
    args = marked(args)
    plan = autoshard.plan(model, args, mesh="a=2", hardware="cpu-gloo", constraints=["baseline ddp"])
    mask = args[1].clone()
    mask[0] = name != "all rows"
    found = steps(model, args, plan, (args[0], mask, torch.tensor([0, 1, 2, 60, 1])))
    said = [str(each) for each in found if isinstance(each, Exception) and not isinstance(each, PeerFailed)]
    assert said and all(isinstance(each, Exception) for each in found)
    for text in said:
        assert "autoshard.representative" in text and __file__ in text


def test_python_does_with_known_numbers_whatever_it_likes() -> None:
    def of_a_list(x: Tensor, m: Tensor, n: Tensor) -> Tensor:
        sizes = n.tolist()  # 3, 4, 2, 3, 2
        whole, rest = divmod(sizes[1], 3)
        return x.sum() * (100 * sorted(sizes)[2] + 10 * whole + rest) * int(np.cumsum(sizes)[2])

    model, args = example(of_a_list)
    graph = capture(model, marked(args))
    assert {311, 9} <= {given for node in graph.nodes for given in node.args if isinstance(given, int)}


class Padding(nn.Module):
    """Pads by a number in a buffer, as convolutions of EnCodec do, which every call makes one more."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 8)
        self.register_buffer("pad", torch.tensor(2))

    def forward(self, x: Tensor) -> Tensor:
        padded = nn.functional.pad(self.enter(x), (int(self.pad), 0))
        self.pad.add_(1)
        return padded.cumsum(-1).square().mean()


def test_a_buffer_is_representative_as_long_as_it_decides_the_same() -> None:
    model, args = Padding().double(), (torch.randn(4, 8, dtype=torch.float64),)
    with pytest.raises(CaptureError, match=r"autoshard\.representative\(tensor\).* of those buffers"):
        capture(model, args)
    autoshard.representative(model.pad)
    assert model_key(model, args, {}) is None
    plan = autoshard.plan(model, args, mesh="a=2", hardware="cpu-gloo", constraints=["baseline ddp"])
    check_as_before(model, args, plan, rtol=1e-8, atol=1e-10)

    def twice(rank: int) -> None:
        mesh = init_device_mesh("cpu", plan.mesh.shape, mesh_dim_names=plan.mesh.axes)
        parallel = autoshard.parallelize(copy.deepcopy(model), plan, mesh, args)
        shards = autoshard.shard_inputs(plan, mesh, *args)
        parallel(*shards).backward()
        with pytest.raises(RuntimeError, match="representative"):
            parallel(*shards).backward()

    with capturing_once(capture(model, args, guarded=True)):
        assert run_ranks(2, twice) == [None, None]
