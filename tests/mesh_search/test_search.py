"""The mesh that is found is the best of all, as planning on each of them says."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

import autoshard
from autoshard.cli.commands import app
from autoshard.constraints import gather_constraints
from autoshard.errors import MeshError
from autoshard.mesh_search import Asked, MeshSearch, search_meshes, shapes_of
from autoshard.mesh_search.rows import rows_of
from autoshard.mesh_search.search import held_bytes
from autoshard.planning import Planner, memory_limit
from autoshard.plans import ShardingPlan, read_plan
from cost_models import Hosts, Profile, dump_profile

from ..models import blocks
from ..plans_of import profile_of


@cache
def two_hosts() -> Profile:
    """Hosts of two, four times slower between them than inside."""
    slow = profile_of("slow")
    assert isinstance(slow.network, Hosts)
    inside = slow.network.intra_host
    between = replace(inside, name="between", bandwidth_bytes_per_s=inside.bandwidth_bytes_per_s / 4)
    return replace(slow, network=Hosts(2, inside, between))


@cache
def planner(memory: str | None, batch: int) -> Planner:
    limit = memory_limit("adamw", memory, None, two_hosts())
    return Planner.of_model(*blocks(batch), None, "dp=8", two_hosts(), limit=limit)


def searched(
    memory: str | None = None, batches: Sequence[int] = (64,), texts: Sequence[str] = (), devices: int = 4
) -> MeshSearch:
    asked = [Asked(planner(memory, batch), batch) for batch in batches]
    return search_meshes(asked, devices, lambda mesh: gather_constraints(tuple(texts), mesh), most_axes=2)


def test_the_winner_is_the_best_of_planning_on_every_shape() -> None:
    found = searched(devices=8)
    shapes = shapes_of(8, two_hosts(), 2)
    assert {each.shape.mesh for each in found.candidates} == {shape.mesh for shape in shapes}
    costs = {}
    for each in found.candidates:
        plan = replace(planner(None, 64), mesh=each.shape.mesh).plan(gather_constraints((), each.shape.mesh))
        costs[each.shape.mesh] = plan.solver.cost_ns
        assert each.bound_ns <= plan.solver.cost_ns
        assert each.plan is None or each.plan.solver.cost_ns == plan.solver.cost_ns
    least = min(costs.values())
    assert found.plan.solver.cost_ns == least == costs[found.winner.shape.mesh]
    cut = [each for each in found.candidates if each.verdict == "cut"]
    assert cut and all(each.bound_ns >= least for each in cut)


@pytest.mark.parametrize("optimizer", ["none", "adamw"])
def test_no_plan_holds_less_than_what_is_refused_at_once(optimizer: str) -> None:
    asked = replace(planner(None, 64), limit=memory_limit(optimizer, None, None, two_hosts()))
    for shape in shapes_of(4, two_hosts(), 2):
        fsdp = gather_constraints(tuple(f"family {axis}=fsdp" for axis in shape.mesh.axes), shape.mesh)
        memory = replace(asked, mesh=shape.mesh).plan(fsdp).memory
        assert memory is not None and held_bytes(asked) // 4 <= memory.static_bytes <= memory.peak.size_bytes


def test_of_several_batches_the_least_for_a_sample_wins() -> None:
    found = searched(batches=(8, 64), devices=2)
    alone = [searched(batches=(batch,), devices=2).winner.cost_per_sample for batch in (8, 64)]
    assert found.winner.cost_per_sample == min(alone)
    assert len(found.candidates) == 2


@pytest.mark.thorough
def test_experts_are_planned_by_default_where_the_memory_does_not_bind() -> None:
    def found(memory: str | None, experts: bool | None) -> ShardingPlan:
        asked = [Asked(planner(memory, 64))]
        return search_meshes(asked, 2, lambda mesh: gather_constraints((), mesh), most_axes=1, experts=experts).plan

    free = found(None, None)
    assert free.against is not None and free.memory is not None
    tight = f"{free.memory.reserved_bytes * 99 // 100}B"
    bound = found(tight, None)
    assert bound.solver.cost_ns > free.solver.cost_ns and bound.against is None
    assert found(tight, True).against is not None


def test_a_mesh_that_lost_with_a_bound_below_the_winner_is_called_unsolved() -> None:
    search = searched(devices=8)
    best, slower = search.winner, search.candidates[1]
    assert slower.verdict == "slower" and "solved" not in rows_of(search)[1].reason
    unsolved = replace(slower, bound_ns=best.plan.solver.cost_ns - 1 if best.plan else 0)
    rows = rows_of(MeshSearch(8, (best, unsolved)))
    assert rows[1].reason.endswith("slower, as far as it was solved")


def test_a_mesh_without_an_axis_that_a_constraint_names_has_no_plan() -> None:
    found = searched(texts=["family tp=fsdp"])
    assert {str(each.shape.mesh): each.verdict for each in found.candidates} == {
        "dp=2,tp=2": "best",
        "dp=4": "no plan",
    }
    with pytest.raises(MeshError, match="on no mesh of 4 devices; on dp=4: unknown mesh axis"):
        searched(texts=["family ep=fsdp"])


def test_plan_takes_auto_for_a_mesh() -> None:
    model, args = blocks()
    plan = autoshard.plan(model, args, mesh="auto", devices=4, hardware=two_hosts(), name="Blocks")
    assert autoshard.dump_plan(plan) == autoshard.dump_plan(searched().plan)
    for given in ({"mesh": "auto"}, {"mesh": "dp=2", "devices": 2}):
        with pytest.raises(MeshError, match="devices"):
            autoshard.plan(model, args, **given)


MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
    def forward(self, x):
        return self.down(self.up(x).relu()).square().mean()

def model(batch=64):
    return Model(), (torch.randn(batch, 8),)

def fixed():
    return model()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "machine.yaml").write_text(dump_profile(two_hosts()))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_search_prints_tables_and_writes_plans_and_pictures(folder: Path) -> None:
    arguments = "search model.py:model --hardware machine.yaml --devices 2,4 --batch 32,64 -o found".split()
    arguments += ["--processes", "1", "--price", "2.5"]
    printed = CliRunner().invoke(app, arguments)
    assert printed.exit_code == 0, printed.stderr
    assert printed.stderr == ""
    names = ["meshes-2.svg", "meshes-4.svg", "plan-2.yaml", "plan-4.yaml", "scaling.svg"]
    assert sorted(path.name for path in (folder / "found").iterdir()) == names
    assert all(f"wrote found/{name}" in printed.stdout for name in names)
    said = json.loads(CliRunner().invoke(app, [*arguments, "--format", "json"]).stdout)
    for devices in (2, 4):
        best = said["meshes"][str(devices)][0]
        planned = [row for row in said["meshes"][str(devices)] if row["step_s"] is not None]
        assert all(row["expert"] and row["step_s"] <= row["expert_s"] * (1 + 1e-9) for row in planned)
        plan = read_plan(f"found/plan-{devices}.yaml")
        assert plan.against is not None and plan.against.expert == best["expert"]
        assert (best["verdict"], best["mesh"], best["step_s"]) == ("best", str(plan.mesh), plan.step_s)
        assert plan.mesh.size == devices and best["mesh"] in printed.stdout
    assert [row["devices"] for row in said["devices"]] == [2, 4] and said["devices"][0]["efficiency"] == 1
    assert all(row["cost"] == 2.5 * row["device_hours"] for row in said["devices"]) and "cost" in printed.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ("--devices 0", 2, "'0' is no list of numbers above 0"),
        ("--devices 4 --hardware cpu-none", 2, "cpu-none"),
        ("--devices 4 --hardware one.yaml", 2, "there is no mesh of 4 devices: hardware profile"),
        ("--devices 2 --memory 1KiB", 2, "no mesh of 2 devices has a plan that fits 1 KiB per rank: parameters, grad"),
        ("--devices 2 --memory 5KiB", 2, "no mesh of 2 devices has a plan that fits 5 KiB per rank: the smallest"),
        ("--devices 2,4 --constraint family\\ pt=fsdp", 2, "on no mesh of 4 devices; on dp=4: unknown mesh axis 'pt'"),
        ("--devices 4 --batch 8", 2, "takes no argument 'batch'"),
    ],
)
def test_a_mistake_leaves_every_file_as_it_was(folder: Path, arguments: str, code: int, said: str) -> None:
    network = two_hosts().network
    assert isinstance(network, Hosts)
    Path("one.yaml").write_text(dump_profile(replace(two_hosts(), network=replace(network, inter_host=None))))
    Path("found").mkdir()
    Path("found/plan-4.yaml").write_text("good")
    given = shlex.split(f"search model.py:fixed --hardware machine.yaml {arguments} --processes 1 -o found")
    result = CliRunner().invoke(app, given)
    assert result.exit_code == code and said in result.stderr, result.stderr
    assert [path.read_text() for path in Path("found").iterdir()] == ["good"]
