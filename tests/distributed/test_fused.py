"""Parameters of which each part is cut: their values are the model's own, in whatever way they are read or written."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor

import autoshard
from autoshard.layout import S, parse_layout
from autoshard.lowering.adapter import local_of
from autoshard.plans import ShardingPlan

from . import cases
from .harness import run_ranks
from .parity import Differences, check_parity, device_mesh_of, full
from .test_precision import LIMITS, trained
from .test_weights import write

MESH, FUSED = "dp=2,tp=2", "h.0.attn.c_attn.weight"


def other_values() -> dict[str, torch.Tensor]:
    """A state of the model with values of its own everywhere."""
    state = cases.make("gpt2")[0].state_dict()
    return {name: torch.arange(value.numel()).view(value.shape).to(value.dtype) for name, value in state.items()}


def wrong(module: torch.nn.Module, expected: dict[str, torch.Tensor]) -> list[str]:
    return [name for name, value in module.state_dict().items() if not torch.equal(full(value), expected[name])]


def emptied(module: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            local_of(parameter).fill_(-1.0)


def _read_and_written(text: str, folder: Path) -> dict[str, Any]:
    plan = autoshard.parse_plan(text)
    mesh = device_mesh_of(plan)
    model, example = cases.make("gpt2")
    own = {name: value.clone() for name, value in model.state_dict().items()}
    module = autoshard.parallelize(model, plan, mesh)
    other, off = other_values(), {}
    off["as it was made"] = wrong(module, own)
    made = dict(module.named_parameters())[FUSED]
    theirs = distribute_tensor(own[FUSED], mesh, made.placements)  # as exported source does
    off["as torch cuts it"] = [] if torch.equal(theirs.to_local(), local_of(made)) else [FUSED]
    for name, load in {
        "safetensors": lambda: autoshard.load_weights(module, folder / "w.safetensors"),
        "a checkpoint of one process": lambda: autoshard.load_weights(module, folder / "whole"),
        "load_state_dict": lambda: module.load_state_dict(other),
        "a full state": lambda: set_model_state_dict(
            module, dict(other), options=StateDictOptions(full_state_dict=True)
        ),
    }.items():
        emptied(module)
        load()
        off[name] = wrong(module, other)
    emptied(module)
    with autoshard.as_one_process(module), torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(other[name])
    off["as one process"] = wrong(module, other)
    off["a full state, read"] = [
        name
        for name, value in get_model_state_dict(module, options=StateDictOptions(full_state_dict=True)).items()
        if not torch.equal(value, other[name])
    ]
    module.load_state_dict(own)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    module(*autoshard.shard_inputs(plan, mesh, *example)).backward()
    with autoshard.measure_collectives(mesh) as log:
        optimizer.step()
    weight = dict(module.named_parameters())[FUSED]
    assert isinstance(weight.grad, DTensor) and weight.grad.placements == weight.placements
    state = {"model": module.state_dict(), "optimizer": get_optimizer_state_dict(module, optimizer)["state"]}
    wholes = {name: full(value) for name, value in state["model"].items()}
    moments = full(state["optimizer"][FUSED]["exp_avg"])
    dcp.save(state, checkpoint_id=folder / "parts")
    emptied(module)
    dcp.load({"model": module.state_dict()}, checkpoint_id=folder / "parts")
    off["a checkpoint with parts"] = wrong(module, wholes)
    return {
        "off": off,
        "wholes": wholes,
        "moments": moments,
        "sent": log.records,
        "local": tuple(local_of(weight).shape),
    }


def _in_parts(plan: ShardingPlan) -> set[str]:
    """The cuts in parts among what operators take and give."""
    layouts = (layout for entry in plan.operators for layout in (*entry.inputs, *entry.outputs) if layout)
    return {str(placement) for layout in layouts for placement in layout if placement.parts}


def _differences(case: str, texts: list[str]) -> list[Differences]:
    mesh = device_mesh_of(autoshard.parse_plan(texts[0]))
    return [check_parity(case, text, mesh, steps=2) for text in texts]


@pytest.mark.thorough
def test_several_micro_batches_hold_casts_and_sums_in_parts() -> None:
    model, args = cases.make("gpt2")
    plan = autoshard.plan(
        model,
        args,
        mesh=MESH,
        hardware=cases.slow_machine(),
        constraints=["baseline fsdp+tp"],
        micro_batches=2,
        param_dtype="float64",
        reduce_dtype="float32",
    )
    held = {e.name: e.outputs[0] for e in plan.operators if e.outputs[0] is not None}
    assert {name.partition("/")[2].split("_")[0] for name, layout in held.items() if layout.has_parts} >= {"cast"}
    results = run_ranks(4, trained, "gpt2", autoshard.dump_plan(plan), timeout_s=200.0)
    assert all(seen.within(LIMITS["float64"]) for seen in results), results


@pytest.mark.parametrize(
    ("case", "seeds"),
    [
        ("fused", (0,)),
        pytest.param("fused", (1, 2), marks=pytest.mark.thorough),
        pytest.param("fused 2:1:1", (0, 1, 2), marks=pytest.mark.thorough),
        pytest.param("fused 4:1:1", (0, 1), marks=pytest.mark.thorough),
        pytest.param("crossed", (1,), marks=pytest.mark.thorough),
        pytest.param("crossed", (0,), marks=pytest.mark.thorough),
    ],
)
def test_random_plans_with_parts_train_like_one_process(case: str, seeds: tuple[int, ...]) -> None:
    plans = [cases.random_plan(case, MESH, seed) for seed in seeds]
    assert all(_in_parts(plan) for plan in plans)
    results = run_ranks(4, _differences, case, [autoshard.dump_plan(plan) for plan in plans], timeout_s=200.0)
    assert all(seen.within(1e-4) for each in results for seen in each), results


def test_whoever_reads_or_writes_a_parameter_cut_in_parts_has_the_models_own_values(tmp_path: Path) -> None:
    plan = cases.baseline_plan("gpt2", MESH, "fsdp+tp")
    (entry,) = (entry for entry in plan.parameters if entry.name == FUSED)
    assert entry.layout == parse_layout("dp:S(1) tp:S(0/3)", plan.mesh) and entry.layout[1] == S(0, (32, 32, 32))
    write(tmp_path / "w.safetensors", other_values())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no other process saves
        dcp.save(other_values(), checkpoint_id=tmp_path / "whole", no_dist=True)
    results = run_ranks(4, _read_and_written, autoshard.dump_plan(plan), tmp_path, timeout_s=200.0)
    reference, example = cases.make("gpt2")
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    reference(*example).backward()
    optimizer.step()
    for seen in results:
        assert not any(seen["off"].values()), seen["off"]
        assert seen["local"] == (48, 16) and not seen["sent"]
        expected = optimizer.state[dict(reference.named_parameters())[FUSED]]["exp_avg"]
        torch.testing.assert_close(seen["moments"], expected, rtol=1e-4, atol=1e-8)
    # what the ranks saved is read by a process that knows nothing of parts
    alone = {name: torch.zeros_like(value) for name, value in reference.state_dict().items()}
    moments = {FUSED: {"exp_avg": torch.zeros(96, 32)}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load({"model": alone, "optimizer": moments}, checkpoint_id=tmp_path / "parts", no_dist=True)
    assert all(torch.equal(alone[name], value) for name, value in results[0]["wholes"].items())
    assert torch.equal(moments[FUSED]["exp_avg"], results[0]["moments"])
