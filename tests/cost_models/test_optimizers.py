"""Bytes of optimizer state and of optimizer steps: by formula, and in torch's own optimizers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cost_models import OPTIMIZERS, load_profile, optimizer_policy

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


class Kernels(TorchDispatchMode):
    """Notes the bytes that each kernel reads and writes, those of numbers without dims left out."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read = {id(tensor): tensor for tensor in tree_leaves((args, kwargs)) if torch.is_tensor(tensor)}
        written = {id(tensor): tensor for tensor in tree_leaves(result) if torch.is_tensor(tensor)}
        size = sum(t.numel() * t.element_size() for t in (*read.values(), *written.values()) if t.ndim)
        if size:
            self.sizes.append(size)
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", TORCH)
def test_the_kernels_of_a_step_read_and_write_what_those_of_torch_do(name: str, dtype: torch.dtype) -> None:
    """From the second step on: the first one makes the state."""
    parameters = [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in ((3, 5), (7,))]
    optimizer = TORCH[name](parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with Kernels() as ran:
        optimizer.step()
    rule = optimizer_policy(name).kernel_bytes
    assert ran.sizes == [size for each in parameters for size in rule(each.numel(), dtype.itemsize)]


@given(st.integers(1, 1 << 40), itemsizes)
def test_a_step_touches_the_gradient_once_and_parameter_and_state_twice_at_least(count: int, itemsize: int) -> None:
    """Each is read, and the parameter and its state are written."""
    for name in set(OPTIMIZERS) - {"none"}:
        policy = optimizer_policy(name)
        state = policy.state_bytes(count, itemsize) - 4 * (name == "adamw")  # its count of steps
        assert sum(policy.kernel_bytes(count, itemsize)) >= min(3 * itemsize, 12) * count + 2 * state


def test_a_step_takes_a_launch_for_each_kernel_and_the_time_of_its_bytes() -> None:
    compute = load_profile("dgx-h100").compute
    bytes_s = 20 * (1 << 20) * 2 / (compute.memory_bandwidth_bytes_per_s * 0.85)
    found = optimizer_policy("adamw").step_s(compute, "bfloat16", 1 << 20, 2)
    assert found == pytest.approx(8 * compute.launch_s + bytes_s)
    assert optimizer_policy("none").step_s(compute, "bfloat16", 1 << 20, 2) == 0.0


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_of_adamw_takes_what_was_measured_of_it(name: str) -> None:
    plain = load_profile("dgx-h100").compute
    measured = replace(plain, memory_efficiency={**plain.memory_efficiency, "optimizer": 0.5}, optimizer_launch_s=1e-4)
    policy = optimizer_policy(name)
    found = policy.step_s(measured, "bfloat16", 1 << 20, 2)
    if "adamw" not in name or "8bit" in name:
        assert found == policy.step_s(plain, "bfloat16", 1 << 20, 2)
        return
    moved = sum(policy.kernel_bytes(1 << 20, 2))
    assert found == pytest.approx(1e-4 + moved / (plain.memory_bandwidth_bytes_per_s * 0.5))


@given(elements, elements, itemsizes)
def test_more_elements_need_no_less(few: int, more: int, itemsize: int) -> None:
    few, more = sorted((few, more))
    for name in set(OPTIMIZERS) - {"adamw-8bit"}:  # small parameters keep 32 bits there
        policy = optimizer_policy(name)
        assert policy.state_bytes(few, itemsize) <= policy.state_bytes(more, itemsize)
        assert policy.step_bytes(few, itemsize) <= policy.step_bytes(more, itemsize)
        assert sum(policy.kernel_bytes(few, itemsize)) <= sum(policy.kernel_bytes(more, itemsize))


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
