"""What is asked of a member on a mesh, cell by cell, and what came of it."""

from __future__ import annotations

import copy
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autoshard
from autoshard.capture import CapturedGraph, capture, input_names
from autoshard.constraints import gather_constraints
from autoshard.constraints.baselines import baselines
from autoshard.errors import AutoshardError, ConstraintError, InfeasibleError
from autoshard.mesh import Mesh
from autoshard.planning.budget import NothingFitsError
from autoshard.planning.formulation import Formulation
from autoshard.planning.limit import memory_limit
from autoshard.planning.planner import Planner
from autoshard.plans import ShardingPlan, dump_plan, parse_plan
from solver import Solution
from tests.fuzz.judge import capturing_once
from tests.fuzz.random_plans import random_plan
from tests.fuzz.ranks import PeerFailed, run_ranks
from tests.plans_of import profile_of

from .member import Member

SHARE = 0.6
"""The tight budget, as a share of the peak of the optimum without one."""

TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-4}
"""The largest difference of a loss, gradient or buffer, as a share of its largest number, or of a thousandth of the
largest number in any gradient: models in double precision that compute norms in single agree no better in sums."""

PREFERRED = ("fsdp+tp", "tp", "ddp", "fsdp", "hsdp", "ddp+tp", "sp", "fsdp+sp")
"""Of the baselines of a mesh the first two that a model can have are run."""

MOST_TRIED = 5
"""How many baselines are tried: to find out why there is none takes longer than to plan one."""

TIME_LIMIT_S = 10.0
"""Of a solve, of a processor: a plan need not be proved optimal to be run."""

TRIAL_S = 0.2
"""Seconds of a processor in which it is found how much of one there is beside what else runs."""


@dataclass(frozen=True)
class Cell:
    """One check, on a mesh or, where ``mesh`` is empty, of the model.

    Its outcome is ``ok``; ``none``, where no plan is possible, for the reason in ``detail``; ``open``, where none was
    found in the time given, which proves nothing; or ``failed``.
    """

    mesh: str
    what: str
    outcome: str
    detail: str = ""
    cpu_s: float = 0.0


@dataclass(frozen=True)
class _Captured:
    """The graph that ranks run, and what plans the model on all meshes, which captures once, too."""

    graph: CapturedGraph
    planner: Planner


@dataclass(frozen=True)
class _Free:
    """The optimum of a model on a mesh without a budget."""

    plan: ShardingPlan
    formulation: Formulation
    solution: Solution


class Checks:
    """The checks of one member; each goes on after another that failed."""

    def __init__(
        self, member: Member, tight: bool = True, keep: Callable[[Checks, str], None] = lambda checks, mesh: None
    ) -> None:
        self._member, self._tight = member, tight
        self._keep = keep  # told after each check on a mesh
        self.cells: list[Cell] = []
        self.operators: list[dict[str, Any]] = []

    def run(self) -> list[Cell]:
        """All of them."""
        self._model, self._given = self._member.example()
        self._expected = _seen(copy.deepcopy(self._model), self._given)
        captured = self._cell("", "capture", self._captured)
        if captured is not None:
            self._cell("", "audit", self._audit)
            for text in self._member.meshes:
                self._on(captured.planner.having(mesh=Mesh.parse(text)), captured.graph)
        return self.cells

    def _captured(self) -> _Captured:
        mesh, profile = self._member.meshes[0], profile_of("slow")
        limit = memory_limit("adamw", None, None, profile)
        planner = Planner.of_model(self._model, (), self._given, mesh, profile, limit=limit)
        return _Captured(capture(self._model, (), self._given, guarded=True), planner)

    def _on(self, planner: Planner, graph: CapturedGraph) -> None:
        mesh, text = planner.mesh, str(planner.mesh)
        free = self._cell(text, "plan", lambda: _free(planner))
        optimum = None if free is None else free.plan
        if optimum is not None:
            self._cell(text, "optimum", lambda: self._parity(optimum, graph))
        if free is not None and self._tight:
            peak = free.plan.memory.reserved_bytes if free.plan.memory else 0
            tight = self._cell(text, "plan at 60%", lambda: _fitted(planner, free, int(SHARE * peak)))
            if tight is not None:
                self._cell(text, "at 60%", lambda: self._parity(tight, graph))
        names = [base.name for base in baselines(mesh)]
        had = 0
        for name in sorted(names, key=lambda name: (PREFERRED + tuple(names)).index(name))[:MOST_TRIED]:
            had += had < 2 and self._baseline(planner, name, graph)
        drawn = self._cell(text, "plan drawn", lambda: random_plan(graph, mesh, 1, self._model, (), self._given))
        if drawn is not None:
            self._cell(text, "drawn", lambda: self._parity(parse_plan(dump_plan(drawn)), graph))

    def _baseline(self, planner: Planner, name: str, graph: CapturedGraph) -> bool:
        """Whether the model can have the scheme."""
        text = str(planner.mesh)
        print(self._member.name, text, "plan", name, flush=True)
        before = time.process_time()
        try:
            plan = _of_scheme(planner, name)
        except Exception as error:
            outcome = "none" if isinstance(error, ConstraintError | InfeasibleError) else "failed"
            self._note(Cell(text, name, outcome, _short(error), time.process_time() - before))
            return outcome == "failed"
        self._cell(text, name, lambda: self._parity(plan, graph))
        return True

    def _parity(self, plan: ShardingPlan, graph: CapturedGraph) -> None:
        """Raises where a rank sees another loss or gradient than one process."""
        models = [copy.deepcopy(self._model) for _ in range(plan.mesh.size)]
        names = dict(zip(input_names(self._model, (), self._given), self._given))

        def one(rank: int) -> dict[str, torch.Tensor]:
            mesh = init_device_mesh("cpu", plan.mesh.shape, mesh_dim_names=plan.mesh.axes)
            parallel = autoshard.parallelize(models[rank], plan, mesh, (), self._given)
            shards = autoshard.shard_inputs(plan, mesh, *(self._given[names[entry.name]] for entry in plan.inputs))
            return _seen(parallel, self._given | dict(zip((names[entry.name] for entry in plan.inputs), shards)))

        with capturing_once(graph):
            results = run_ranks(plan.mesh.size, one)
        errors = [result for result in results if isinstance(result, BaseException)]
        for error in sorted(errors, key=lambda error: isinstance(error, PeerFailed)):
            raise error
        for rank, found in enumerate(results):
            _compare(self._expected, found, rank, TOLERANCE[self._member.dtype])

    def _audit(self) -> None:
        made = autoshard.audit(self._model, (), self._given, mesh="a=2,b=4", hardware=profile_of("slow"))
        self.operators = [vars(operator) for operator in made.operators]

    def _note(self, cell: Cell) -> None:
        self.cells.append(cell)
        for mesh in [cell.mesh] if cell.mesh else self._member.meshes if cell.outcome == "failed" else ():
            self._keep(self, mesh)

    def _cell(self, mesh: str, what: str, check: Callable[[], Any]) -> Any:
        print(self._member.name, mesh, what, flush=True)
        before = time.process_time()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made = check()
        except Exception as error:
            if not isinstance(error, AutoshardError | Differs):
                traceback.print_exception(error)
            self._note(Cell(mesh, what, _outcome(error), _short(error), time.process_time() - before))
            return None
        self._note(Cell(mesh, what, "ok", "", time.process_time() - before))
        return made


def _free(planner: Planner) -> _Free:
    """The optimum without a budget, with its program, of which the tight plan is a plan as well."""
    planner = _in_time(planner)
    formulation = planner.formulate(gather_constraints((), planner.mesh))
    solution = planner.solve(formulation)
    return _Free(planner.fitted(formulation, free=solution), formulation, solution)


def _fitted(planner: Planner, free: _Free, budget: int) -> ShardingPlan:
    """The best plan that holds no more than the budget."""
    limit = memory_limit("adamw", budget, None, planner.profile)
    return _in_time(planner).having(limit=limit).fitted(free.formulation, free=free.solution, asks_experts=True)


def _of_scheme(planner: Planner, scheme: str) -> ShardingPlan:
    """The plan of a baseline."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _in_time(planner).plan(gather_constraints((f"baseline {scheme}",), planner.mesh))


def _in_time(planner: Planner) -> Planner:
    """The planner with the time limit of a solve by the clock: where others run beside, as many times longer as a short
    piece of work takes just now.
    """
    by_clock_s, of_processor_s = time.monotonic(), time.process_time()
    while (took_s := time.process_time() - of_processor_s) < TRIAL_S:
        pass
    return planner.having(time_limit_s=TIME_LIMIT_S * max(1.0, (time.monotonic() - by_clock_s) / took_s))


def _outcome(error: Exception) -> str:
    """Whether a budget leaves no plan, none was found, or something is wrong."""
    if isinstance(error, NothingFitsError):
        return "none" if error.is_proven else "open"
    return "failed"


class Differs(Exception):
    """A rank sees another number than one process."""


def _seen(model: nn.Module, given: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The loss of a call, the gradients of parameters, and the buffers after it."""
    result = model(**given)
    loss = result if isinstance(result, torch.Tensor) else result.loss
    loss.backward()
    seen = {"loss": loss.detach()}
    seen |= {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    seen |= {name: buffer.detach() for name, buffer in model.named_buffers()}
    return {name: getattr(value, "full_tensor", lambda value=value: value)() for name, value in seen.items()}


def _compare(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor], rank: int, tolerance: float) -> None:
    # tensors that modules have as attributes are buffers of a captured model alone
    others = {name for name in expected.keys() ^ found.keys() if name in expected or name.startswith("gradient")}
    if others:
        raise Differs(f"rank {rank} has {sorted(others)}, or has it not")
    gradients = [value for name, value in expected.items() if name.startswith("gradient") and value.numel()]
    least = 1e-3 * max((float(value.abs().max()) for value in gradients), default=1.0)
    for name, theirs in expected.items():
        ours = found[name]
        if theirs.shape != ours.shape or theirs.dtype != ours.dtype:
            raise Differs(f"rank {rank}: {name} is {ours.dtype}{list(ours.shape)}")
        if not theirs.numel() or torch.equal(theirs, ours):
            continue
        by = float((theirs.double() - ours.double()).abs().max()) / max(float(theirs.double().abs().max()), least)
        if not by <= tolerance:
            raise Differs(f"rank {rank}: {name} differs by {by:.2g}")


def _short(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:600]
