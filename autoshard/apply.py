"""The executing half, read top to bottom: capture, match, check, lower, verify. Needs no solver and no cost model."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .capture import (
    CapturedGraph,
    as_arguments,
    capture,
    check_is_module,
    described,
    in_mode,
    micro_batched,
    rebuild_call,
    recomputed,
)
from .disk_cache import disk_cache
from .errors import InputError, PlanMismatchError, StrategyWarning, VerificationError
from .garbage import seldom_collected
from .layout import format_strategy
from .lowering import (
    Draws,
    Failures,
    Inputs,
    LocalProgram,
    Random,
    ServedPlan,
    agreed,
    at_batch,
    batch_size,
    bind,
    check_class,
    check_device_mesh,
    check_graph,
    check_held_alike,
    check_mesh,
    check_order,
    check_random,
    check_redistributions,
    check_same_start,
    check_same_tensors,
    check_untaken,
    code_digest,
    converted,
    even_sizes,
    keep_freed_memory,
    lower,
    open_board,
    plan_digest,
    save_parts,
    shard_parameters,
    verify,
    with_batch,
)
from .ops import registered
from .plans import ShardingPlan
from .plans.text.contradictions import Contradiction, check_record
from .strategies import Enumerator, Rulebook, Strategy, asked_by

STAGES = ("comparing plans", "capturing the model", "sharding the parameters")
"""What all ranks do in :func:`parallelize`, one after the other, as errors say it."""


def parallelize(
    model: nn.Module,
    plan: ShardingPlan | Sequence[ShardingPlan],
    mesh: DeviceMesh,
    args: Any = None,
    kwargs: dict[str, Any] | None = None,
    *,
    random: Random = "per-shard",
    batches: Sequence[int] = (),
) -> nn.Module:
    """Makes a model the module that runs a plan on this rank. Every rank calls it with the same plan.

    Args:
        model: the model the plan was made for. Its parameters become DTensors, and itself the result: an object of a
            subclass of its class, under the same name, with a forward that is the plan's. Values are those of the
            mesh's first rank; parameters on the meta device stay there, as DTensors to be filled with ``to_empty`` and
            the model's own initialisation.
        plan: a plan for this model, these shapes and this mesh; or several, among which every call chooses by its
            shapes, by the modes of the model (``train()``, ``eval()``) and by whether a backward can follow. All hold
            the parameters as the first one does (``held_as`` of :func:`autoshard.plan`).
        mesh: the DeviceMesh of the job, with axis names.
        args, kwargs: example arguments of global shapes; only needed where the plan cannot describe the call (arguments
            nested in containers of the user's own), and then one plan is served.
        random: how numbers are drawn (dropout): ``per-shard``, each shard its own and replicas alike; or
            ``as-one-process``, the numbers of one process whatever the plan, for which every rank draws whole tensors.
            See ``docs/random.md``.
        batches: further sizes of the batch, which every plan is to serve with the layouts that it has: a last batch of
            fewer samples, say. The model is captured for each of them. What a plan says of time and memory is said
            of the size that it was made for.

    Returns:
        The model, which trains now: parameters are DTensors under their original FQNs, gradients arrive in their
        placements, and the collectives that run are exactly those of the plan.

    Raises:
        PlanMismatchError: the plan was made for another model, other shapes or another mesh; says which part differs.
        VerificationError: a plan that contradicts itself, a layout that no rule allows, or a lowered graph that would
            not communicate as planned.
        CaptureError: the model is not one static graph.
        InputError: it is a parallel module already, its class cannot have a subclass, ``random`` is no way to draw, or
            a plan cannot have a batch of another size.
        JobError: the ranks have different plans, meshes, models, versions of torch or autoshard, or another rank failed
            here or did not come; says which, and in what.
    """
    if isinstance(plan, str | PathLike):
        raise InputError(
            f"parallelize takes a plan, got the path {plan!s}; read it: autoshard.read_plan({str(plan)!r})"
        )
    check_is_module(model)
    plans = [plan] if isinstance(plan, ShardingPlan) else list(plan)
    if not plans:
        raise InputError("parallelize was given an empty list of plans; give it one plan, or several")
    check_device_mesh(mesh)
    check_random(random)
    sizes = _sizes(plans, batches)
    board = open_board(mesh)
    failures = Failures(board)
    for k, each in enumerate(plans):
        stage = STAGES[0] if k == 0 else f"{STAGES[0]}, the one at {k} in the list"
        with agreed(board, stage):
            check_mesh(each, mesh)
            check_order(each, mesh)
            check_same_start(board, stage, each, mesh, len(plans), random, sizes)
    with agreed(board, STAGES[1]):
        check_class(model)
        check_untaken(model)
        with seldom_collected():
            lowered = [_lowered(model, each, mesh, args, kwargs, random, None) for each in plans]
            others = [(each, size) for size in sizes for each in plans if batch_size(each) != size]
            lowered += [_lowered(model, each, mesh, args, kwargs, random, size) for each, size in others]
        check_held_alike([each.plan for each in lowered], [each.program for each in lowered])
        check_same_tensors(board, STAGES[1], model)
    with agreed(board, STAGES[2]), failures.telling(STAGES[2]):
        if any(entry.layout.has_parts for entry in plans[0].parameters):
            save_parts()
        keep_freed_memory(mesh.device_type)
        shard_parameters(model, plans[0], mesh)
        draws = Draws(mesh) if any(each.program.is_random for each in lowered) else None
        served = [each.served(model, mesh, failures, draws) for each in lowered]
        return converted(model, served, mesh, failures, draws)


def _sizes(plans: Sequence[ShardingPlan], batches: Sequence[int]) -> tuple[int, ...]:
    """The further sizes, each once.

    Raises:
        InputError: there can be none.
    """
    if isinstance(batches, int):
        raise InputError(f"batches is the number {batches}; give a list of sizes, [{batches}]")
    for size in batches:
        if type(size) is not int or size < 1:
            raise InputError(f"batches names the size {size!r}; give whole numbers from 1 up")
    for plan in plans if batches else ():
        batch_size(plan)
        if plan.micro_batches > 1:
            raise InputError(
                f"a step of the plan is {plan.micro_batches} micro-batches of one size; batches of other sizes need a "
                "plan of one"
            )
    return tuple(dict.fromkeys(batches))


@dataclass(frozen=True, eq=False)
class _Lowered:
    """A plan, and the graph and the program of it; ``grad`` says whether the model was captured with gradients, and
    ``training`` in which mode each of its modules was.
    """

    plan: ShardingPlan
    graph: CapturedGraph
    program: LocalProgram
    inputs: Inputs
    grad: bool
    training: tuple[bool, ...]

    def served(self, model: nn.Module, mesh: DeviceMesh, failures: Failures, draws: Draws | None) -> ServedPlan:
        drawn = draws if self.program.is_random else None
        graph, modes = self.graph, self.training
        with torch.set_grad_enabled(self.grad):
            return ServedPlan(model, self.plan, mesh, self.program, self.inputs, graph, modes, drawn, failures)


def _lowered(
    model: nn.Module,
    plan: ShardingPlan,
    mesh: DeviceMesh,
    args: Any,
    kwargs: dict[str, Any] | None,
    random: Random,
    size: int | None,
) -> _Lowered:
    rank = bind(mesh, plan.links)
    if size is not None:
        args, kwargs = _example(with_batch(plan, size))
    elif args is None:
        args, kwargs = _example(plan)
    args = as_arguments(args)
    grad = torch.is_grad_enabled() and any(entry.phase == "backward" for entry in plan.operators)
    with torch.set_grad_enabled(grad):
        graph, plan, training = _captured(model, plan, args, kwargs, size)
    program = lower(graph, plan, rank, random=random)
    verify(program, plan, rank.groups)
    inputs = Inputs(
        model,
        plan,
        mesh,
        args,
        kwargs or {},
        strided=graph.asks_for_strides,
        classed=graph.asks_for_classes,
        absent=graph.absent_attributes,
    )
    return _Lowered(plan, graph, program, inputs, grad, training)


def _captured(
    model: nn.Module, plan: ShardingPlan, args: tuple[Any, ...], kwargs: dict[str, Any] | None, size: int | None
) -> tuple[CapturedGraph, ShardingPlan, tuple[bool, ...]]:
    """The graph of a plan, captured in the mode that it was made for: as the model is, or in the other one (training or
    evaluation), in which the model is not left; a forward alone in evaluation, or as the model is. Also the plan, for a
    batch of the size where one is given; and the mode of each module of the model.

    Raises:
        PlanMismatchError: it was made for neither; says what differs in the first of them.
    """
    as_it_is, other = nullcontext(), in_mode(model, training=torch.is_grad_enabled() and not model.training)
    first, second = (as_it_is, other) if torch.is_grad_enabled() else (other, as_it_is)
    try:
        with first:
            return _as_planned(model, plan, args, kwargs, size)
    except PlanMismatchError:
        with suppress(PlanMismatchError), second:
            return _as_planned(model, plan, args, kwargs, size)
        raise


def _as_planned(
    model: nn.Module, plan: ShardingPlan, args: tuple[Any, ...], kwargs: dict[str, Any] | None, size: int | None
) -> tuple[CapturedGraph, ShardingPlan, tuple[bool, ...]]:
    training = tuple(module.training for module in model.modules())
    graphs = disk_cache("graphs", code_digest())
    captured = capture(model, args, kwargs, guarded=True, precision=plan.precision, graphs=graphs)
    graph = recomputed(micro_batched(captured, plan.micro_batches), plan.recomputed)
    if size is None:
        check_once(plan, graph)
        return graph, plan, training
    resized = at_batch(plan, graph)
    try:
        check_once(resized, graph)
    except VerificationError as error:
        raise PlanMismatchError(
            f"a batch of {size} cannot have the layouts of the plan, which is one for {batch_size(plan)}: {error}. "
            f"Give {even_sizes(plan, size)}, or make a plan for it (autoshard plan ... --held-as PLAN.yaml) and give "
            "parallelize both"
        ) from None
    return graph, resized, training


def check_once(plan: ShardingPlan, graph: CapturedGraph) -> None:
    """:func:`check_plan`, of which the next start reads that this plan was right for such a graph."""
    checks, operators = disk_cache("checks", code_digest()), described(registered())
    if checks is None or operators is None:
        return check_plan(plan, graph)
    key = json.dumps([torch.__version__, graph.fingerprint, plan_digest(plan), operators])
    if checks.get(key) is not None:
        return check_graph(plan, graph)
    check_plan(plan, graph)
    checks.put(key, b"right")


def check_plan(plan: ShardingPlan, graph: CapturedGraph) -> None:
    """Checks that a plan is one for a graph, whole and without contradiction.

    However it was made or edited: it computes the right numbers, or is refused.

    Raises:
        PlanMismatchError: it is for another graph.
        VerificationError: it contradicts itself, has layouts that no rule allows, or redistributes what they do not
            need.
    """
    try:
        check_record(plan)
    except Contradiction as error:
        raise VerificationError(f"the plan contradicts itself: {error}; make the plan again") from None
    check_graph(plan, graph)
    check_strategies(plan, graph)
    check_redistributions(plan, graph)


def check_strategies(plan: ShardingPlan, graph: CapturedGraph) -> None:
    """Checks that every layout of a plan is one that its operator or tensor can really have, by the same verified rules
    that planning uses: a plan edited by hand computes the right numbers or is refused.

    Raises:
        VerificationError: it is not.
    """
    chosen = {entry.name: Strategy(entry.inputs, entry.outputs) for entry in plan.operators}
    held = (*plan.parameters, *plan.buffers, *plan.inputs)
    chosen |= {entry.name: Strategy((), (entry.layout,)) for entry in held}
    chosen |= {f"grad.{e.name.removeprefix('output.')}": Strategy((), (e.layout,)) for e in plan.outputs}
    enumerator = Enumerator(graph, plan.mesh, Rulebook.of_process(), asked_by(graph, chosen))
    known: dict[int, frozenset[Strategy]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StrategyWarning)  # said when the plan was made
        for node in graph.nodes:
            if node.name not in chosen:
                raise VerificationError(f"the plan has no entry for {node.name}; make the plan again")
            offered = enumerator.strategies(node)  # equal nodes get the same tuple
            if id(offered) not in known:
                known[id(offered)] = frozenset(offered)
            if chosen[node.name] not in known[id(offered)]:
                raise VerificationError(_no_rule(node.name, chosen[node.name], plan))


def _no_rule(name: str, strategy: Strategy, plan: ShardingPlan) -> str:
    text = format_strategy(strategy.inputs, strategy.outputs, plan.mesh)
    return (
        f"the plan gives {name} the strategy {text}, which no verified rule of torch {torch.__version__} allows; make "
        "the plan again, or choose a layout that it can have"
    )


def _example(plan: ShardingPlan) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if not plan.call:
        raise PlanMismatchError(
            "the plan does not say how the model is called (its arguments are nested in containers of your own); give "
            "parallelize example arguments too"
        )
    entries = {entry.name: entry for entry in plan.inputs}

    def tensor(name: str) -> torch.Tensor:
        if name not in entries:
            raise PlanMismatchError(f"the plan's call names the tensor {name!r}, which is not among its inputs")
        return torch.empty(entries[name].shape, dtype=getattr(torch, entries[name].dtype), device="meta")

    return rebuild_call(plan.call, tensor)
