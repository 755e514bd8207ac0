"""Results and gradients on real processes, where parameters are cut: as with the model in one process, or refused."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import autoshard

from ..lowering import test_backward
from ..lowering.sessions import Model, differences, example, loss_of, outcome_of, state_of
from .harness import run_ranks

PINS = ("x=tp:R", "v=tp:S(1)", "w=tp:S(0)")
SESSIONS = test_backward.PARITY


def many_results(m: Any, x: Tensor) -> Any:
    y = (x @ m.v).relu() @ m.w
    m.count.add_(1)
    views = y[0], y.t(), y, y.detach(), x[1:], m.w.t(), m.v[:2]
    return {"y": y, "views": views, "same": (m.w, m.scale, x, m.count), "other": (y.argmax(1), y.square().mean(), 3)}


def _pair(body: Any, mesh: DeviceMesh) -> tuple[nn.Module, nn.Module]:
    reference = Model(body)
    return autoshard.auto_parallelize(deepcopy(reference), mesh, (example(),), pins=PINS), reference


def _sessions() -> dict[str, list[str]]:
    """What differs after each session; a refusal counts."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    made = _pair(test_backward.body, mesh)
    assert {c.kind for _, c in made[0].plan.collectives()}, "nothing is communicated"
    seen = {}
    for name, session in SESSIONS.items():
        (ours, failed), (theirs, _) = (outcome_of(session, deepcopy(module)) for module in made)
        seen[name] = [repr(failed)] if failed else list(differences(ours, theirs))
    for name, (session, _) in test_backward.CHANGED.items():
        _, refused = outcome_of(session, deepcopy(made[0]))
        seen[f"changed: {name}"] = [] if isinstance(refused, autoshard.errors.BackwardError) else [repr(refused)]
    parallel, reference = _pair(many_results, mesh)
    for step in range(2):
        ours, theirs = parallel(example()), reference(example())
        seen[f"results {step}"] = list(differences(ours, theirs))
        for results in (ours, theirs):
            loss_of(results).backward()
        seen[f"gradients {step}"] = list(differences(state_of(parallel), state_of(reference)))
    return seen


def test_sessions_end_as_in_one_process():
    for seen in run_ranks(2, _sessions, timeout_s=240.0):
        assert len(seen) > 30
        assert not {name: found for name, found in seen.items() if found}


def _through_different_results() -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parallel, _ = _pair(test_backward.body, mesh)
    results = parallel(example())
    _, error = outcome_of(lambda m: results[dist.get_rank()].sum().backward(), parallel)
    return f"{type(error).__name__}: {error}"


def test_ranks_that_go_backward_through_different_results_are_told_so():
    for rank, said in enumerate(run_ranks(2, _through_different_results)):
        assert said.startswith("BackwardError: this rank goes backward through result") and f"result {rank} " in said
