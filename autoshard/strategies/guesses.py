"""Rules that nobody wrote down: guesses for an operator of torch that has no rule, tried in a child of this process.

Kernels check their arguments for the calls that torch makes, not for those that a wrong guess makes. Some then read
or write outside of their tensors, which ends the process or, worse, does not: ``_weight_norm_interface_backward`` and
the backward of batch norms, of pools and of paddings do. In a child this costs the guess and nothing else.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..capture import Node, TensorMeta
from ..layout import Placement, R, S
from ..ops import Rule
from .rule_check import Check

# a bound this much smaller is one that the numbers of a trial, and sums of them, are beyond
_BOUND = 1e-3
# what the trials of one operator may take; they take milliseconds
_LIMIT_S = 60.0


def guessed_rules(node: Node, inputs: tuple[TensorMeta, ...], parts: int) -> list[Rule]:
    """Rules that hold: one dim cut in everything that has the rank of the first result, the rest whole.

    A number among the arguments may be a bound, as of the lengths that ``renorm`` cuts short. Rules must also hold
    where it is small, as random numbers may be far from the one that is given.

    Empty where this system cannot fork.

    Args:
        parts: the number of ranks of the axis.
    """
    guesses = _alike(node, inputs)
    checks = [Check(form, inputs, parts) for form in _forms(node)]
    questions = [lambda rule=rule: all(check.holds(rule) for check in checks) for rule in guesses]
    return [rule for rule, holds in zip(guesses, in_child(questions)) if holds]


def _forms(node: Node) -> list[Node]:
    """A node, and the same with small bounds if there are any."""
    if not any(isinstance(given, float) for given in (*node.args, *dict(node.kwargs).values())):
        return [node]

    def small(given: Any) -> Any:
        return given * _BOUND if isinstance(given, float) else given

    kwargs = tuple((name, small(given)) for name, given in node.kwargs)
    return [node, replace(node, args=tuple(map(small, node.args)), kwargs=kwargs)]


def _alike(node: Node, inputs: tuple[TensorMeta, ...]) -> list[Rule]:
    first = node.outputs[0]
    if first is None:
        return []

    def cut(meta: TensorMeta | None, dim: int) -> Placement:
        return S(dim) if meta is not None and len(meta.shape) == len(first.shape) else R

    return [
        Rule(tuple(cut(m, d) for m in inputs), tuple(None if m is None else cut(m, d) for m in node.outputs))
        for d in range(len(first.shape))
        if all(meta is None or cut(meta, d) == R or meta.shape[d] > 1 for meta in (*inputs, *node.outputs))
    ]


def in_child(questions: Sequence[Callable[[], bool]], limit_s: float = _LIMIT_S) -> list[bool]:
    """Answers yes-or-no questions in a child process. One that kills the child, or outlasts the limit, is a no.

    The next question after a killing one gets a new child. No child is left when this returns or raises.
    """
    answers: list[bool] = []
    while len(answers) < len(questions) and hasattr(os, "fork"):
        answers += _answers(questions[len(answers) :], limit_s)
        if len(answers) < len(questions):
            answers.append(False)  # the question that the child died of
    return answers or [False] * len(questions)


def _answers(questions: Sequence[Callable[[], bool]], limit_s: float) -> list[bool]:
    """What one child says before it is done or dead, one byte for each question."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns of threads that hold a lock while the process forks; the child then outlasts its limit
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        _answer_and_exit(questions, writing)
    os.close(writing)
    said, deadline = b"", time.monotonic() + limit_s
    poll = select.poll()
    poll.register(reading, select.POLLIN)
    try:
        while poll.poll(max(0.0, 1000 * (deadline - time.monotonic()))):
            piece = os.read(reading, len(questions))
            said += piece
            if not piece:
                break
    finally:
        os.close(reading)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return [byte == ord("y") for byte in said]


def _answer_and_exit(questions: Sequence[Callable[[], bool]], writing: int) -> None:
    """The child: answers in order, on one thread as threads do not survive a fork, and ends without cleaning up."""
    with contextlib.suppress(BaseException):
        faulthandler.disable()
        silent = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(silent, stream)
        torch.set_num_threads(1)
        for question in questions:
            os.write(writing, b"y" if question() else b"n")
    os._exit(0)
