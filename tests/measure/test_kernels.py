"""The numbers that kernels are timed on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from autoshard.measure import kernels
from autoshard.measure.kernels import KERNELS, STREAMS, kernel, kernel_points
from cost_models import optimizer_policy
from cost_models.samples import KernelPoint

CACHE = 1 << 18


class _Here:
    """A job of this process alone, which is all that a kernel asks of one."""

    device = torch.device("cpu")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The numbers of every tensor that is filled, where a cache of ``CACHE`` bytes has to be gone through."""
    counts: list[int] = []
    filled = kernels._numbers

    def counted(shape: tuple[int, ...], *args: Any) -> torch.Tensor:
        counts.append(math.prod(shape))
        return filled(shape, *args)

    monkeypatch.setattr(kernels, "COLD_BYTES", {"cpu": CACHE})
    monkeypatch.setattr(kernels, "_numbers", counted)
    kernels._pool.cache_clear()
    yield counts
    kernels._pool.cache_clear()


@pytest.mark.parametrize("name", STREAMS)
def test_of_what_exceeds_the_cache_one_set_is_made(name: str, made: list[int]) -> None:
    """On four ranks of a machine with 24 GiB, 64 tables of 128 MiB for an embedding were more than there is."""
    (point,) = [p for p in kernel_points(64, CACHE * 4) if _is(p, name, CACHE * 4)]
    kernel(_Here(), point)()  # type: ignore[arg-type]
    pool, *others = made
    assert pool * 4 == CACHE
    assert 0 < sum(others) <= point.bytes_moved / 4, "of what is read and written, which has all inputs"


@pytest.mark.parametrize("name", STREAMS)
def test_small_inputs_are_other_numbers_each_time(name: str, made: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    (point,) = [p for p in kernel_points(64, CACHE // 32) if _is(p, name, CACHE // 32)]
    read: list[int] = []
    found = KERNELS[name]

    def seen(first: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        read.append(first.data_ptr())
        return found.call(first, *others)

    monkeypatch.setitem(KERNELS, name, replace(found, call=seen))
    run = kernel(_Here(), point)  # type: ignore[arg-type]
    for _ in range(3):
        run()
    assert len(set(read)) == 3
    assert len(made) == 1, "all of them are parts of the pool"


def test_the_step_of_an_optimizer_moves_what_its_policy_says() -> None:
    (point,) = [p for p in kernel_points(64, 1 << 12) if p.name == "adamw"]
    parameter, *others = KERNELS["adamw"].inputs(point.shape, torch.ones)
    expected = torch.nn.Parameter(parameter.clone())
    expected.grad = others[0].clone()
    optimizer = torch.optim.AdamW([expected], foreach=False)
    optimizer.state[expected] = {"exp_avg": others[1].clone(), "exp_avg_sq": others[2].clone(), "step": torch.zeros(())}
    optimizer.step()
    KERNELS["adamw"].call(parameter, *others)
    assert torch.equal(parameter, expected.detach())
    policy = optimizer_policy("adamw")
    assert point.bytes_moved == sum(policy.kernel_bytes(math.prod(point.shape), 4))


def _is(point: KernelPoint, name: str, size: int) -> bool:
    return (point.name, point.dtype) == (name, "float32") and math.prod(point.shape) * 4 == size
