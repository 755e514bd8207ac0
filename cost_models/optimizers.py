"""Bytes of an optimizer's state, and of what its step makes besides, by policy.

A policy is what a user names: which state an optimizer keeps for every trained parameter. Formulas are per parameter of
``n`` elements of ``p`` bytes each, as one rank holds it.

===================  ===========================  ========================  ==================================
policy               state                        while it steps            source
===================  ===========================  ========================  ==================================
none                 0                            0                         inference, or another's business
sgd                  0                            0                         torch.optim.SGD
sgd-momentum         n p                          0                         torch.optim.SGD, momentum_buffer
adamw                2 n p + 4                    2 n p                     torch.optim.AdamW, exp_avg,
                                                                            exp_avg_sq, step
adamw-8bit           2 (n + 4 ceil(n / 256))      16 n                      Dettmers et al. 2022, section 2;
                                                                            torchao AdamW8bit, bitsandbytes
adamw-master-weights 8 n, and 4 n where p < 4     8 n, and n p              Rajbhandari et al. 2020 (ZeRO),
                                                                            section 3.1: K = 12
===================  ===========================  ========================  ==================================

*While it steps*: copies that the step makes of one parameter at a time. torch's AdamW still has the denominator of the
parameter before, of n p bytes, when it makes the two of the next one (its loop lets go of the variable only then).
Measured with torch 2.13 on CPU for the torch optimizers (``benchmarks/memory.py``); for the other two it follows from
what they compute in float32 and is assumed. torch's ``foreach`` step, its default for plain tensors on CUDA, makes
them for all parameters at once; for DTensors, which autoshard's parameters are, torch steps one by one unless told
otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

BLOCK = 256
"""Elements that share one float32 scale. Source: torchao, AdamW8bit(block_size=256); bitsandbytes since 0.44."""
SMALLEST_8BIT = 4096
"""Parameters of fewer elements keep 32-bit state. Source: torchao and bitsandbytes (min_8bit_size=4096)."""

Rule = Callable[[int, int], int]


@dataclass(frozen=True)
class OptimizerPolicy:
    """``state_bytes(n, p)`` are kept from step to step, ``step_bytes(n, p)`` are made while one parameter steps, and
    ``left_bytes(n, p)`` of these are still there while the next one does.
    """

    name: str
    state_bytes: Rule
    step_bytes: Rule
    left_bytes: Rule


def optimizer_policy(name: str) -> OptimizerPolicy:
    """The policy of a name.

    Raises:
        ValueError: there is none; the message lists those there are.

    >>> adamw = optimizer_policy("adamw")
    >>> adamw.state_bytes(1000, 4), adamw.step_bytes(1000, 4)
    (8004, 8000)
    """
    if name not in _POLICIES:
        raise ValueError(f"unknown optimizer policy {name!r}; choose one of {', '.join(_POLICIES)}")
    return _POLICIES[name]


def _nothing(elements: int, itemsize: int) -> int:
    return 0


def _state_8bit(elements: int, itemsize: int) -> int:
    if elements < SMALLEST_8BIT:
        return 8 * elements
    return 2 * (elements + 4 * -(-elements // BLOCK))


def _master_state(elements: int, itemsize: int) -> int:
    return (8 if itemsize >= 4 else 12) * elements


def _master_step(elements: int, itemsize: int) -> int:
    return 8 * elements + (elements * itemsize if itemsize < 4 else 0)


_POLICIES = {
    policy.name: policy
    for policy in (
        OptimizerPolicy("adamw", lambda n, p: 2 * n * p + 4, lambda n, p: 2 * n * p, lambda n, p: n * p),
        OptimizerPolicy("sgd", _nothing, _nothing, _nothing),
        OptimizerPolicy("sgd-momentum", lambda n, p: n * p, _nothing, _nothing),
        OptimizerPolicy("adamw-8bit", _state_8bit, lambda n, p: 16 * n, _nothing),
        OptimizerPolicy("adamw-master-weights", _master_state, _master_step, _nothing),
        OptimizerPolicy("none", _nothing, _nothing, _nothing),
    )
}

OPTIMIZERS = tuple(_POLICIES)
"""The names of the policies."""
