"""Random operators on real processes: each shard its own numbers and replicas alike, or the numbers of one process."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoshard
from autoshard.errors import StrategyWarning
from autoshard.mesh import Mesh
from autoshard.plans import ShardingPlan

from . import cases
from .harness import caught, run_ranks
from .parity import Differences, check_parity, device_mesh_of, full
from .test_parity import LIMIT

SEED = 7
RATE = 0.25
SHAPE = (257, 96)  # the rows are 129 and 128 on two ranks


class Noise(nn.Module):
    """Draws in many ways; ``turned`` lies in memory column by column, in which order one process draws."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.rand(SHAPE, generator=torch.Generator().manual_seed(0)) + 1)

    def forward(self) -> dict[str, Tensor]:
        w = self.w
        return {
            "dropout": F.dropout(w, RATE, True),
            "turned": F.dropout(w.t(), RATE, True),
            "bernoulli": torch.bernoulli(torch.full_like(w, 1 - RATE)),
            "uniform": torch.rand_like(w),
            "normal": torch.randn(SHAPE),
            "integers": torch.randint(0, 4, SHAPE),
            "exponential": torch.empty_like(w).exponential_(),
            "shuffled": torch.randperm(SHAPE[0]),
        }


def _noise_plan(axes: str) -> ShardingPlan:
    """Every operator that draws is cut by rows, ``turned`` by columns, along the first axis alone."""
    mesh = Mesh.parse(axes)
    cut, turned = f"{mesh.axes[0]}:S(0)", f"{mesh.axes[0]}:S(1)"
    drawn = ("native_dropout", "bernoulli", "rand_like", "randn", "randint", "exponential")
    pins = [f"/{name}={cut}" for name in drawn] + [f"/native_dropout.1={turned}", f"w={cut}", f"output.1={turned}"]
    pins += [f"output.{k}={cut}" for k in (0, 2, 3, 4, 5, 6)]
    with pytest.warns(StrategyWarning, match=r"randperm.* runs replicated"):
        return autoshard.plan(Noise(), mesh=mesh, hardware="cpu-gloo", pins=pins)


def _drawn(text: str, random: Any) -> dict[str, Any]:
    """What this rank draws: its shards of the first forward; whether the same seed and step give the same bits again,
    and another step others; the gradient; and what differing seeds are told.
    """
    plan = autoshard.parse_plan(text)
    mesh = device_mesh_of(plan)
    torch.manual_seed(SEED + torch.distributed.get_rank())  # that of the first rank counts
    module = autoshard.parallelize(Noise(), plan, mesh, random=random)
    before = torch.get_rng_state()
    results = module()
    (results["dropout"].sum() + 2 * results["turned"].sum()).backward()
    second = module()
    assert torch.equal(torch.get_rng_state(), before), "the job's own generator has moved"
    autoshard.manual_seed(module, SEED, step=1)
    resumed = module()
    autoshard.manual_seed(module, SEED)
    first = module()
    for name, value in results.items():
        mine = value.to_local()
        assert torch.equal(mine, first[name].to_local()), name
        assert torch.equal(second[name].to_local(), resumed[name].to_local()), name
        assert not torch.equal(mine, second[name].to_local()), name
    rank = torch.distributed.get_rank()
    return {
        "shards": {name: value.to_local().detach() for name, value in results.items()},
        "whole": {name: full(value).detach() for name, value in results.items()},
        "gradient": full(module.w.grad),
        "refused": caught(lambda: autoshard.manual_seed(module, SEED, step=rank)),
    }


@pytest.fixture(scope="module")
def per_shard() -> list[dict[str, Any]]:
    return run_ranks(4, _drawn, autoshard.dump_plan(_noise_plan("dp=2,tp=2")), "per-shard")


def test_replicas_draw_alike_and_shards_draw_their_own(per_shard: list[dict[str, Any]]) -> None:
    a, b, c, d = (found["shards"] for found in per_shard)
    for name in a:
        assert torch.equal(a[name], b[name]) and torch.equal(c[name], d[name]), name
        if name == "shuffled":  # runs whole everywhere
            assert torch.equal(a[name], c[name])
            continue
        dim = int(name == "turned")
        shorter = c[name].shape[dim]
        assert (a[name].shape[dim], shorter) == (129, 128)
        drawn, other = a[name].narrow(dim, 0, shorter), c[name]
        if name in ("dropout", "turned"):
            drawn, other = drawn != 0, other != 0
        assert not torch.equal(drawn, other), name


def test_what_shards_draw_has_the_distribution_of_the_operator(per_shard: list[dict[str, Any]]) -> None:
    weights, count = Noise().w.detach(), math.prod(SHAPE)
    # name: what is averaged, its mean, and the variance of one element
    moments = {
        "kept": (lambda found: (found["dropout"] != 0).double(), 1 - RATE, RATE * (1 - RATE)),
        "scaled": (lambda found: (found["dropout"] / weights).double(), 1.0, RATE / (1 - RATE)),
        "turned": (lambda found: (found["turned"] != 0).double(), 1 - RATE, RATE * (1 - RATE)),
        "bernoulli": (lambda found: found["bernoulli"].double(), 1 - RATE, RATE * (1 - RATE)),
        "uniform": (lambda found: found["uniform"].double(), 0.5, 1 / 12),
        "normal": (lambda found: found["normal"].double(), 0.0, 1.0),
        "squares": (lambda found: found["normal"].double().square(), 1.0, 2.0),
        "integers": (lambda found: found["integers"].double(), 1.5, 1.25),
        "exponential": (lambda found: found["exponential"].double(), 1.0, 1.0),
        # operators and shards are independent of each other
        "both": (
            lambda found: ((found["dropout"] != 0) & (found["turned"].t() != 0)).double(),
            (1 - RATE) ** 2,
            (1 - RATE) ** 2 * (1 - (1 - RATE) ** 2),
        ),
        "halves": (
            lambda found: (found["uniform"][:128] - 0.5).double() * (found["uniform"][129:] - 0.5) * 2,
            0.0,
            4 / 144 * 2,
        ),
    }
    for name, (values, mean, variance) in moments.items():
        found = float(values(per_shard[0]["whole"]).mean())
        assert abs(found - mean) < 5 * math.sqrt(variance / count), (name, found)


def test_the_backward_keeps_what_the_forward_kept(per_shard: list[dict[str, Any]]) -> None:
    whole = per_shard[0]["whole"]
    expected = ((whole["dropout"] != 0).float() + 2 * (whole["turned"] != 0).float().t()) / (1 - RATE)
    torch.testing.assert_close(per_shard[0]["gradient"], expected)


def test_ranks_that_seed_a_module_differently_are_refused(per_shard: list[dict[str, Any]]) -> None:
    kinds, texts = zip(*(found["refused"] for found in per_shard))
    assert set(kinds) == {"InputError"} and all("say the same on all ranks" in text for text in texts)


@pytest.mark.parametrize("axes", ["dp=2,tp=2", "dp=3"])
def test_numbers_as_in_one_process_are_those_of_one_process(axes: str) -> None:
    plan = _noise_plan(axes)
    torch.manual_seed(SEED)
    model = Noise()
    expected = model()
    (expected["dropout"].sum() + 2 * expected["turned"].sum()).backward()
    for found in run_ranks(plan.mesh.size, _drawn, autoshard.dump_plan(plan), "as-one-process"):
        for name, value in expected.items():
            torch.testing.assert_close(found["whole"][name], value.detach(), msg=name)
        torch.testing.assert_close(found["gradient"], model.w.grad)


def _seed(seeds: Iterator[int], *call: Any) -> None:
    torch.manual_seed(next(seeds))


def _train(texts: list[str]) -> list[Differences]:
    """GPT-2 with dropout, under one plan after the other, drawn as in one process."""
    found = []
    for text in texts:
        plan = autoshard.parse_plan(text)
        mesh = device_mesh_of(plan)
        model, _ = cases.make("gpt2 dropout")
        reference = deepcopy(model)
        torch.manual_seed(SEED)
        parallel = autoshard.parallelize(model, plan, mesh, random="as-one-process")
        seeds = itertools.count(SEED)
        reference.register_forward_pre_hook(partial(_seed, seeds))
        sgd = partial(torch.optim.SGD, lr=0.1)
        found.append(check_parity("gpt2 dropout", text, mesh, 2, (parallel, reference), sgd))
    return found


def test_gpt2_with_dropout_trains_as_in_one_process_under_any_plan() -> None:
    model, args = cases.make("gpt2 dropout")
    plans = [
        cases.baseline_plan("gpt2 dropout", "dp=2", "ddp"),
        autoshard.plan(model, args, mesh="dp=2", micro_batches=2, constraints=["family dp=fsdp"]),
        cases.random_plan("gpt2 dropout", "dp=2", seed=0, again=0.3),
    ]
    assert plans[2].recomputed
    drawn = [e.outputs[0] for plan in plans for e in plan.operators if e.name.endswith("native_dropout")]
    assert sum(layout is not None and not layout.is_replicated for layout in drawn) > len(drawn) / 2
    for seen in run_ranks(2, _train, [autoshard.dump_plan(plan) for plan in plans], timeout_s=120.0):
        assert all(each.within(LIMIT) for each in seen), seen
