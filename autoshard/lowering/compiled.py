"""The step of a parallel module as two operators of torch, for graphs that ``torch.compile`` makes.

``autoshard::forward`` takes the shards of a plan's arguments and gives the results, new values of buffers and, where a
backward follows, the number of the step; ``autoshard::backward`` takes that number and tangents and gives gradients.
A compiler sees no further, so that what was planned runs: what the forward saves, what it computes again and what is
communicated are the plan's. What is computed between collectives, the compiler compiles all the same, see
:mod:`autoshard.lowering.pieces`.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Protocol
from uuid import uuid4

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .adapter import compiler_of_trace, keeps_graph, watched_inside
from .emitter import LocalGraph
from .failure import Failures
from .kept import Kept
from .local_program import LocalProgram
from .pieces import Compiler, Pieces
from .placements import readable
from .served_plan import ServedPlan


class Serving(Protocol):
    """What the operators need of a parallel module beside its plans."""

    plans: tuple[ServedPlan, ...]
    failures: Failures

    def taken(self, module: nn.Module, plan: ServedPlan) -> dict[str, torch.Tensor]:
        """The parameters and buffers that a plan takes, after all checks of a call."""


_MODULES: weakref.WeakValueDictionary[str, nn.Module] = weakref.WeakValueDictionary()
_SERVING: weakref.WeakKeyDictionary[nn.Module, tuple[str, Serving]] = weakref.WeakKeyDictionary()
_COMPILERS: list[tuple[Compiler, Pieces]] = []
_KEPT: dict[int, Kept] = {}
_STEPS = itertools.count()


def key_of(module: nn.Module, serving: Serving) -> str:
    """The name under which the operators find a parallel module. No other has it, in this process or another one: torch
    keeps compiled graphs on disk.
    """
    if module not in _SERVING:
        key = uuid4().hex
        _SERVING[module], _MODULES[key] = (key, serving), module
    return _SERVING[module][0]


def compiler_number() -> int:
    """The number under which the operators find the backend that a module is traced for."""
    compiler = compiler_of_trace()
    for number, (known, _) in enumerate(_COMPILERS):
        if known == compiler:
            return number
    _COMPILERS.append((compiler, Pieces(compiler)))
    return len(_COMPILERS) - 1


def _found(key: str, number: int) -> tuple[nn.Module, Serving, ServedPlan]:
    module = _MODULES[key]
    serving = _SERVING[module][1]
    return module, serving, serving.plans[number]


def made_by(program: LocalProgram) -> list[int]:
    """The numbers of the results that an operator makes, in the order in which ``autoshard::forward`` gives them."""
    return [k for k, value in enumerate(_outputs(program.forward)[: program.results]) if value is not None]


def _forward(
    key: str, number: int, compiler: int, grad: bool, keeps: bool, shards: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    module, serving, plan = _found(key, number)
    program, step, pieces = plan.program, plan.step, _COMPILERS[compiler][1]
    off = torch.autocast(step.mesh.device_type, enabled=False)
    with torch.no_grad(), off, watched_inside(), serving.failures.telling("the forward"):
        with torch.set_grad_enabled(grad):
            held = serving.taken(module, plan)
        if keeps:
            assert program.backward is not None
            pieces.of(program.backward)  # now, while no rank waits for another
        graph = pieces.of(program.forward if keeps else program.forward_alone)
        # A compiler may put other values where arguments and results were: what is kept must not be in their memory.
        values = [
            shard.clone() if keeps and name in program.exposed_arguments and name not in held else shard
            for name, shard in zip(program.arguments, shards)
        ]
        with plan.draws.forward() if plan.draws else nullcontext():
            made = graph([readable(value) for value in values])
        count = program.results + len(program.mutated)
        results = [
            value.clone() if keeps and k in program.exposed_results else value
            for k, value in enumerate(made[: program.results])
            if value is not None
        ]
        results += [value.clone(memory_format=torch.contiguous_format) for value in made[program.results : count]]
        if keeps:
            kept = Kept()
            kept.save(made[count:])
            exposed = sorted(program.exposed_arguments & held.keys())
            kept.watch([step.title(name) for name in exposed], [held[name] for name in exposed])
            results.append(_number_of(kept))
        return results


def _number_of(kept: Kept) -> torch.Tensor:
    """The number of a step, as a tensor: what the step keeps goes when nobody has that tensor any more."""
    number = next(_STEPS)
    _KEPT[number] = kept
    found = torch.tensor(number)
    weakref.finalize(found.untyped_storage(), _KEPT.pop, number, None)
    return found


def _backward(
    key: str, number: int, compiler: int, step: torch.Tensor, tangents: Sequence[torch.Tensor | None]
) -> list[torch.Tensor]:
    _, serving, plan = _found(key, number)
    program = plan.program
    with torch.no_grad(), watched_inside(), serving.failures.telling("the backward"):
        used = frozenset(k for k, tangent in zip(program.tangents, tangents) if tangent is not None)
        backward = plan.step.backwards.of(used)
        values = _KEPT[int(step)].take(used, backward.needed, () if keeps_graph() else backward.spent)
        values += [tangent.contiguous() for tangent in tangents if tangent is not None]
        with torch.autocast(plan.step.mesh.device_type, enabled=False):
            found = _COMPILERS[compiler][1].of(backward.graph)(values)
        return [like.zero_() if value is None else value for value, like in zip(found, _gradients_like(program))]


def _forward_like(
    key: str, number: int, compiler: int, grad: bool, keeps: bool, shards: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """What the forward gives, without values."""
    program = _found(key, number)[2].program
    made = _outputs(program.forward)[: program.results + len(program.mutated)]
    results = [_like(value) for value in made if value is not None]
    return [*results, torch.empty((), dtype=torch.int64)] if keeps else results


def _backward_like(
    key: str, number: int, compiler: int, step: torch.Tensor, tangents: Sequence[torch.Tensor | None]
) -> list[torch.Tensor]:
    return _gradients_like(_found(key, number)[2].program)


def _gradients_like(program: LocalProgram) -> list[torch.Tensor]:
    assert program.backward is not None
    return [_like(value) for value in _outputs(program.backward)]


def _outputs(graph: LocalGraph) -> Sequence[torch.fx.Node]:
    outputs: Any = graph.graph.output_node().args[0]
    return outputs  # type: ignore[no-any-return]


def _like(node: torch.fx.Node) -> torch.Tensor:
    value = node.meta["val"]
    return torch.empty(value.shape, dtype=value.dtype, device=value.device)


def _remember(ctx: Any, inputs: Any, output: list[torch.Tensor]) -> None:
    key, number, compiler, _, keeps, _ = inputs
    ctx.where = key, number, compiler
    if keeps:
        ctx.save_for_backward(output[-1])


def _go_back(ctx: Any, gradients: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    key, number, compiler = ctx.where
    program = _found(key, number)[2].program
    by_result = dict(zip(made_by(program), gradients))
    tangents = [_whole(by_result[k]) for k in program.tangents]
    found: dict[str, torch.Tensor] = {}
    if any(tangent is not None for tangent in tangents):
        made = torch.ops.autoshard.backward(key, number, compiler, *ctx.saved_tensors, tangents)
        found = dict(zip(program.trained, made))
    return None, None, None, None, None, [found.get(name) for name in program.arguments]


def _whole(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """The gradient of a plain result, which is a DTensor where the caller added one to it (a norm of parameters)."""
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def _define() -> torch.library.Library:
    library = torch.library.Library("autoshard", "FRAGMENT")
    # of two equal calls each is one of its own, and none is made twice in place of keeping what it gave
    apart = (torch.Tag.nondeterministic_seeded,)
    where = "str module, int plan, int compiler"
    operators: tuple[tuple[str, str, Callable[..., Any], Callable[..., Any]], ...] = (
        ("forward", f"({where}, bool grad, bool keeps, Tensor[] shards) -> Tensor[]", _forward, _forward_like),
        ("backward", f"({where}, Tensor step, Tensor?[] tangents) -> Tensor[]", _backward, _backward_like),
    )
    for name, schema, run, like in operators:
        library.define(name + schema, tags=apart)
        library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"autoshard::{name}", like, lib=library)
    torch.library.register_autograd("autoshard::forward", _go_back, setup_context=_remember, lib=library)
    return library


_LIBRARY = _define()
