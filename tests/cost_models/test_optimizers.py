"""Bytes of optimizer state: by formula, and in torch's own optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cost_models import OPTIMIZERS, optimizer_policy

elements = st.integers(0, 1 << 40)
itemsizes = st.sampled_from([1, 2, 4, 8])

TORCH: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", TORCH)
def test_the_state_is_that_of_torch(name: str, dtype: torch.dtype) -> None:
    parameters = [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in ((3, 5), (7,), ())]
    optimizer = TORCH[name](parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    policy = optimizer_policy(name)
    for parameter in parameters:
        kept = (value for value in optimizer.state[parameter].values() if torch.is_tensor(value))
        found = sum(value.numel() * value.element_size() for value in kept)
        assert policy.state_bytes(parameter.numel(), dtype.itemsize) == found


@given(elements, elements, itemsizes)
def test_more_elements_need_no_less(few: int, more: int, itemsize: int) -> None:
    few, more = sorted((few, more))
    for name in set(OPTIMIZERS) - {"adamw-8bit"}:  # small parameters keep 32 bits there
        policy = optimizer_policy(name)
        assert policy.state_bytes(few, itemsize) <= policy.state_bytes(more, itemsize)
        assert policy.step_bytes(few, itemsize) <= policy.step_bytes(more, itemsize)


@given(st.integers(1 << 12, 1 << 40))
def test_eight_bits_take_about_a_quarter_and_masters_of_bfloat16_three_times_its_moments(count: int) -> None:
    plain = optimizer_policy("adamw").state_bytes(count, 4)
    assert plain / 4 < optimizer_policy("adamw-8bit").state_bytes(count, 4) < plain * 0.27
    # ZeRO, section 3.1: a copy of the weights and two moments, 4 bytes each
    assert optimizer_policy("adamw-master-weights").state_bytes(count, 2) == 12 * count
    assert optimizer_policy("adamw-master-weights").state_bytes(count, 4) == 8 * count
    assert optimizer_policy("none").state_bytes(count, 4) == optimizer_policy("sgd").state_bytes(count, 4) == 0


def test_an_unknown_policy_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown optimizer policy 'adam'; choose one of adamw, sgd, sgd-momentum"):
        optimizer_policy("adam")
