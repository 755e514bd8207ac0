"""Bytes of an optimizer's state, of what its step makes besides, and of what its step reads and writes, by policy.

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
them for all parameters at once, also for the shards that stand for autoshard's parameters there (``docs/gpu.md``); on
a CPU it steps one by one unless told otherwise.

The step is priced kernel by kernel, by the bytes that each reads and writes; what is changed in place is both. Of the
torch optimizers the kernels are those of the single-tensor step of torch 2.13 with its defaults, from the second step
on (``torch/optim/adam.py``, which AdamW runs too, and ``sgd.py``); a test counts them. AdamW's own count of steps, a
number that stands on the host, is left out.

A calibrated profile has the step of torch's AdamW over one tensor as a kind of kernel of its own, ``optimizer``, which
is priced as one: its kernels go over the same tensors one after the other, and find in the caches what the last one
left there, as kernels of a graph do not.

===================  ==========================================================================================
policy               bytes read and written, kernel by kernel
===================  ==========================================================================================
none                 nothing
sgd                  3 n p (``add_``)
sgd-momentum         2 n p, 3 n p, 3 n p (``mul_``, ``add_``, ``add_``)
adamw                2, 3, 2, 3, 2, 2, 2 and 4 n p: together 20 n p (``mul_`` by the decay, ``lerp_``, ``mul_``,
                     ``addcmul_``, ``sqrt``, ``div``, ``add_``, ``addcdiv_``)
adamw-8bit           3 n p and twice the state, in one kernel (torchao compiles the step, bitsandbytes wrote it so);
                     assumed, not measured
adamw-master-weights those of adamw over 4 n bytes; where p < 4 the gradient is read and the parameter written
                     besides, 4 n + n p each; assumed from ZeRO, section 3.1
===================  ==========================================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .compute import Compute

BLOCK = 256
"""Elements that share one float32 scale. Source: torchao, AdamW8bit(block_size=256); bitsandbytes since 0.44."""
SMALLEST_8BIT = 4096
"""Parameters of fewer elements keep 32-bit state. Source: torchao and bitsandbytes (min_8bit_size=4096)."""

ADAMW = (2, 3, 2, 3, 2, 2, 2, 4)
"""Tensors that the kernels of AdamW's step read and write, each as large as the parameter (table above)."""

Rule = Callable[[int, int], int]
Kernels = Callable[[int, int], tuple[int, ...]]


@dataclass(frozen=True)
class OptimizerPolicy:
    """``state_bytes(n, p)`` are kept from step to step, ``step_bytes(n, p)`` are made while one parameter steps, and
    ``left_bytes(n, p)`` of these are still there while the next one does. ``kernel_bytes(n, p)`` are read and written
    by each kernel of the step over one parameter, in order; ``is_adamw`` says that these are AdamW's, which a profile
    may have measured.
    """

    name: str
    state_bytes: Rule
    step_bytes: Rule
    left_bytes: Rule
    kernel_bytes: Kernels
    is_adamw: bool = False

    def step_s(self, compute: Compute, dtype: str, elements: int, itemsize: int) -> float:
        """Seconds of the step over one parameter: as measured, or the sum of its kernels, each bound by memory.

        Raises:
            ProfileError: a dtype without a peak in the profile.
        """
        sizes = self.kernel_bytes(elements, itemsize)
        if self.is_adamw and "optimizer" in compute.memory_efficiency:
            return float(compute.op_s(dtype, 0.0, sum(sizes), "optimizer"))
        return float(sum(compute.op_s(dtype, 0.0, size, "pointwise") for size in sizes))


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


def _no_kernels(elements: int, itemsize: int) -> tuple[int, ...]:
    return ()


def _kernels(*tensors: int) -> Kernels:
    """Kernels that read and write so many tensors of the parameter's size each."""
    return lambda elements, itemsize: tuple(count * elements * itemsize for count in tensors)


def _kernel_8bit(elements: int, itemsize: int) -> tuple[int, ...]:
    return (3 * elements * itemsize + 2 * _state_8bit(elements, itemsize),)


def _master_kernels(elements: int, itemsize: int) -> tuple[int, ...]:
    cast = (4 * elements + elements * itemsize,) if itemsize < 4 else ()
    return (*cast, *_kernels(*ADAMW)(elements, 4), *cast)


_POLICIES = {
    policy.name: policy
    for policy in (
        OptimizerPolicy(
            "adamw", lambda n, p: 2 * n * p + 4, lambda n, p: 2 * n * p, lambda n, p: n * p, _kernels(*ADAMW), True
        ),
        OptimizerPolicy("sgd", _nothing, _nothing, _nothing, _kernels(3)),
        OptimizerPolicy("sgd-momentum", lambda n, p: n * p, _nothing, _nothing, _kernels(2, 3, 3)),
        OptimizerPolicy("adamw-8bit", _state_8bit, lambda n, p: 16 * n, _nothing, _kernel_8bit),
        OptimizerPolicy("adamw-master-weights", _master_state, _master_step, _nothing, _master_kernels, True),
        OptimizerPolicy("none", _nothing, _nothing, _nothing, _no_kernels),
    )
}

OPTIMIZERS = tuple(_POLICIES)
"""The names of the policies."""
