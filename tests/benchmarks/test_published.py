"""Published runs as plans: tiny rows of every kind are built and predicted; what cannot be is named with a reason."""

from __future__ import annotations

import csv
import importlib
import os
import signal
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

published, runs, rows = (importlib.import_module(f"published{part}") for part in ("", "_runs", "_rows"))
predictions, jobs, memory = (importlib.import_module(f"published_{part}") for part in ("predictions", "jobs", "memory"))
CannotBuild, Row = runs.CannotBuild, rows.Row

COLUMNS = (
    *("id", "source", "model", "params", "layers", "d_model", "heads", "kv_heads", "ffn", "vocab", "gpus", "gpu"),
    *("scheme", "mesh", "local_batch", "seq", "dtype", "recompute", "compile", "step_s", "step_s_derived"),
    *("memory_gib", "grad_accum", "pp", "gpus_per_node", "global_batch", "tps_per_gpu", "mfu"),
)
LLAMA = dict.fromkeys(COLUMNS, "") | {
    **{"id": "tiny-eager", "source": "here", "model": "Llama", "layers": "2", "d_model": "64", "heads": "4"},
    **{"kv_heads": "2", "ffn": "128", "vocab": "256", "gpus": "4", "gpu": "H100", "scheme": "FSDP2"},
    **{"local_batch": "2", "seq": "32", "dtype": "bf16", "recompute": "selective (op)", "compile": "no"},
    **{"mesh": "dp_shard=4"},
    **{"step_s": "0.01", "memory_gib": "1", "grad_accum": "1"},
}
GPT = {"model": "GPT 22B", "ffn": "256", "kv_heads": "4", "dtype": "mixed fp16", "gpu": "A100 80GB"}


def run(**cells: str) -> object:
    return runs.Run(Row(LLAMA | cells))


def write(path: Path, *lines: dict[str, str], columns: tuple[str, ...] = COLUMNS) -> str:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(lines)
    return str(path)


@pytest.mark.thorough
def test_rows_are_predicted_and_what_cannot_be_built_is_named(tmp_path, capsys) -> None:
    """Of the rows the compiled one is faster than the eager one, which is the published order; the others are named,
    each with its reason, and stop nothing.
    """
    bad = {
        "float8": ({"dtype": "float8 rowwise"}, "it computes in float8 rowwise, of which no rate"),
        "gpu": ({"gpu": "V100"}, "no profile of V100"),
        "scheme": ({"scheme": "Frobnicate", "mesh": "dp=4"}, "no scheme is called 'Frobnicate'"),
        "pipeline": ({"pp": "4"}, "the mesh has a pipeline"),
        "few": ({"scheme": "FSDP2+TP", "mesh": "tp=4", "heads": "2"}, "cannot share the 2 heads"),  # the planner knows
    }
    lines = [LLAMA | {"id": name} | cells for name, (cells, _) in bad.items()]
    lines += [LLAMA, LLAMA | {"id": "tiny-compiled", "compile": "yes", "step_s": "0.005"}]
    lines.append(LLAMA | {"id": "tiny-unpublished", "step_s": "", "memory_gib": ""})
    picture, tables = tmp_path / "runs.svg", tmp_path / "tables.md"
    data = write(tmp_path / "runs.csv", *lines)
    kept = ["--plans", str(tmp_path / "plans"), "--picture", str(picture), "--tables", str(tables)]
    assert published.main(["--data", data, *kept]) == 0
    each, _, summary = capsys.readouterr().out.partition("Not predicted")
    for name, (_, reason) in bad.items():
        assert reason in next(line for line in each.splitlines() if line.startswith(name))
        assert reason in next(line for line in summary.splitlines() if line.startswith(f"  {name}"))
    assert "not stated" in next(line for line in each.splitlines() if line.startswith("tiny-unpublished"))
    assert "pairs in the published order, all rows: 1 of 1 (100%)" in summary
    assert picture.read_text().count("<circle") == 2
    assert [line.split("`")[1] for line in tables.read_text().splitlines() if "| `" in line] == [
        *("tiny-*", "tiny-eager", "tiny-compiled")
    ]


def test_a_file_without_most_columns_is_read(tmp_path, capsys) -> None:
    few = write(tmp_path / "few.csv", {"id": "a"}, {"id": "a"}, {}, columns=("id", "model"))
    assert published.main(["--data", few]) == 0
    summary = capsys.readouterr().out.partition("Not predicted")[2]
    assert [line.split("  ")[1] for line in summary.splitlines()[1:]] == ["a", "a (row 2)", "row 3"]


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> predictions.Plans:
    """Plans that several tests predict from, each made once."""
    return predictions.Plans(tmp_path_factory.mktemp("plans"))


@pytest.mark.parametrize(
    "cells",
    [
        pytest.param({"recompute": "none", "gpu": "NVIDIA H200", "kv_heads": ""}, marks=pytest.mark.thorough),
        {"recompute": "full (each block)", "kv_heads": "1", "local_batch": "3", "seq": "33"},
        {"mesh": "dp_replicate=2, dp_shard=2", "scheme": "HSDP", "recompute": "selective layer"},
        pytest.param(
            {"mesh": "dp=16", "gpus": "16", "scheme": "FSDP1 HYBRID_SHARD", "recompute": "none"},
            marks=pytest.mark.thorough,
        ),
        {"mesh": "", "scheme": "DDP", "recompute": "no", "grad_accum": "", "global_batch": "16"},
        {"mesh": "dp_shard=2, tp=2", "scheme": "FSDP2+TP(SP)", "compile": "yes"},
        pytest.param(
            {"mesh": "tp=2", "scheme": "Megatron TP, distributed optimizer", "recompute": "selective", "dtype": "bf16"},
            marks=pytest.mark.thorough,
        ),
        GPT | {"mesh": "tp=2, pp=1, dp=2", "scheme": "Megatron TP+SP", "recompute": "full"},
        pytest.param(
            GPT | {"mesh": "tp=2, dp=2", "scheme": "Megatron TP", "recompute": "selective (attention core)"},
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            GPT
            | {"mesh": "dp_shard=4", "model": "MPT-1b", "dtype": "amp_bf16", "recompute": "none", "gpu": "A100 40GB"},
            marks=pytest.mark.thorough,
        ),
        {"model": "Nemotron", "params": str(2 * (3 * 64 * 64 + 2 * 64 * 128) + 2 * 256 * 64), "recompute": "none"},
        {"mesh": "dp_shard=2, cp=2", "scheme": "FSDP2+CP", "local_batch": "1", "recompute": "none"},
    ],
    ids=lambda cells: (
        f"{cells.get('model', 'Llama')} {cells.get('scheme', 'FSDP2')} {cells['recompute']}"
        if "recompute" in cells
        else "selective"
    ),
)
def test_runs_of_every_kind_are_built(cells: dict[str, str], plans: predictions.Plans) -> None:
    one = run(**cells)
    one.check()
    found = predictions.predict(one, plans)
    assert 0 < found.step_s < 1
    assert found.reserved_bytes > 0


def test_of_several_micro_batches_only_the_optimizer_steps_once(plans: predictions.Plans) -> None:
    one, three = (predictions.predict(run(grad_accum=n), plans).step_s for n in ("1", "3"))
    optimizer_s = plans.of(run(), 2).optimizer_s
    assert optimizer_s and three - optimizer_s == pytest.approx(3 * (one - optimizer_s))


def test_weights_that_stay_gathered_are_gathered_once(plans: predictions.Plans) -> None:
    stays = run(scheme="FSDP1 SHARD_GRAD_OP", recompute="none")
    plan = plans.of(stays, 2)
    again = [entry for entry in plan.redistributions if predictions._gathers_again(entry)]
    assert {entry.tensor for entry in again} >= {"output/cast_weight", "layers.0.attention.wq/cast_weight"}
    assert predictions.predict(stays, plans).step_s < predictions.predict(run(recompute="none"), plans).step_s


def test_asynchronous_tensor_parallelism_pays_a_share_of_what_it_hides(plans: predictions.Plans) -> None:
    cells = {"mesh": "dp_shard=2, tp=2", "recompute": "none"}
    waits, hides = (run(scheme=f"FSDP2+TP{more}", **cells) for more in ("", "+AsyncTP"))
    moved = {"all_gather", "reduce_scatter"}
    between = [e for e in plans.of(waits, 2).redistributions if not predictions.is_cast(e.tensor)]
    moved_s = sum(c.predicted_s for e in between for c in e.collectives if c.axis == "tp" and c.kind in moved)
    saved_s = predictions.predict(waits, plans).step_s - predictions.predict(hides, plans).step_s
    assert saved_s == pytest.approx((1 - predictions.load_profile("dgx-h100").contention) * moved_s, rel=1e-3)


def test_in_float8_products_of_layers_are_faster_and_casts_take_their_bytes(plans: predictions.Plans) -> None:
    cells = {"mesh": "dp_shard=2, tp=2", "scheme": "FSDP2+TP", "compile": "yes", "recompute": "full"}
    wide, narrow = run(**cells), run(dtype="float8 tensorwise", **cells)
    plan, profile = plans.of(wide, 2), predictions.load_profile(wide.hardware)
    faster = predictions.in_float8(plan, profile)
    cut = {old.name for old, new in zip(plan.execution, faster.execution) if new.predicted_ns < old.predicted_ns}
    assert {"layers.0.attention.wq/mm", "layers.1.feed_forward.w2/bwd.mm", "layers.0.attention.wo/again.mm"} <= cut
    assert not any("attention/attention" in name or name.startswith("output") for name in cut)
    tokens = 4 * 32 // 2  # of each of two replicas
    inputs, gradients = tokens * (3 * 64 + 128), tokens * (3 * 64 + 2 * 32 + 2 * 128)
    size_bytes = 5 * 2 * (3 * inputs + gradients) / 2  # two layers, three casts of inputs, on half of the ranks each
    assert predictions.casts_s(narrow, profile) == pytest.approx(profile.op_s("bfloat16", 0.0, size_bytes, "pointwise"))
    assert predictions.predict(narrow, plans).step_s != predictions.predict(wide, plans).step_s
    with pytest.raises(CannotBuild, match="no float8"):
        predictions.in_float8(plan, predictions.load_profile("dgx-a100"))


def test_what_fsdp2_reserves_beside_the_computation_is_counted_by_hand(plans: predictions.Plans) -> None:
    """Beyond the plan's own peak, at the loss: the embedding; the last product of each block, which the policy keeps;
    buffers of the gathered root and of a layer; gradients in float32, of which none are there at the loss.
    """
    size = 8192  # of the vocabulary: the loss is what needs most
    eager, compiled, alone = (
        run(vocab=str(size), **cells) for cells in ({}, {"compile": "yes"}, {"scheme": "SimpleFSDP"})
    )
    plan = plans.of(eager, 2)
    assert plan.memory.peak.operator.startswith("/")
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64
    root = 2 * size * 64 + 64
    of_eager, of_compiled, of_alone = (memory.reserved_bytes(each, plan) for each in (eager, compiled, alone))
    pools = 2 * (root + layer) + 4 * (2 * layer + root) / 4
    assert of_compiled - of_alone == pytest.approx(1.09 * 2 * (size * 64 + 64) + pools, abs=2)
    assert of_eager - of_compiled == pytest.approx(1.09 * 2 * (2 * 32 * 64) * 2, abs=2)


def test_megatron_holds_18_bytes_for_a_parameter(plans: predictions.Plans) -> None:
    one = run(**(GPT | {"mesh": "tp=4", "scheme": "Megatron TP", "recompute": "none"}))
    plan = plans.of(one, 2)
    held = memory._Held(one, plan, plan.memory)
    parameters = held._shards(1)
    static = plan.memory.parameter_bytes + plan.memory.optimizer_bytes + held._shards(memory.WIDE)
    assert static == pytest.approx(18 * parameters, rel=1e-3)  # and a counter of steps for each tensor
    shared = run(**(GPT | {"mesh": "tp=2, dp=2", "scheme": "Megatron TP, distributed optimizer", "recompute": "none"}))
    assert shared.ranks_of_a_state == 2


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"pp": "2"}, "a pipeline"),
        ({"pp": "two"}, "pp is 'two'"),
        ({"mesh": "dp=2, ep=2"}, "ep=2"),
        ({"mesh": "lots"}, "'lots', which names no axis"),
        ({"scheme": "ZeRO-3 with CPU offload"}, "offloading"),
        ({"scheme": "Megatron TP", "mesh": ""}, "the mesh is not stated"),
        ({"gpus": "8"}, "does not make 8 GPUs"),
        ({"gpus": "1", "mesh": ""}, "one GPU"),
        ({"gpus": ""}, "gpus is not stated"),
        ({"gpu": "H100 PCIe"}, "no profile of H100 PCIe"),
        ({"gpu": "H20"}, "no profile of H20"),
        ({"gpus": "8", "mesh": "dp_shard=8", "gpus_per_node": "4"}, "hosts of 4 GPUs"),
        ({"recompute": "not stated"}, "recomputation is not stated"),
        ({"recompute": "some"}, "recomputation is 'some'"),
        ({"dtype": ""}, "the dtype is not stated"),
        ({"dtype": "tf32"}, "in tf32"),
        ({"dtype": "FP8 hybrid"}, "fp8 hybrid, of which no rate"),
        ({"dtype": "float8 tensorwise"}, "of which no rate"),  # eager
        ({"local_batch": "1.5"}, "local_batch is '1.5'"),
        ({"local_batch": ""}, "the micro-batch is not stated"),
        ({"layers": "a few"}, "layers is 'a few'"),
        ({"heads": "3"}, "do not divide"),
        ({"grad_accum": "-1"}, "grad_accum is '-1'"),
        ({"model": "Mixtral 8x7B"}, "no layout of Mixtral"),
        ({"model": "Zed", "params": "1e12"}, "no layout of Zed"),
    ],
)
def test_a_run_that_cannot_be_built_says_why(cells: dict[str, str], reason: str) -> None:
    with pytest.raises(CannotBuild, match=reason):
        run(**cells).check()


def test_what_a_row_leaves_out_is_derived() -> None:
    """Of 16 sequences in two micro-batches on 4 ranks each has 2; of 100 tokens a second and GPU 2 x 64 take 1.28 s."""
    one = run(local_batch="", global_batch="16", grad_accum="2", step_s="", tps_per_gpu="100")
    assert one.batch == (8, 32)
    assert one.published_s == pytest.approx(2 * 2 * 32 / 100)
    assert run(local_batch="2", global_batch="24", grad_accum="").accumulated == 3
    by_mfu = run(step_s="", mfu="50")
    assert by_mfu.published_s == pytest.approx(by_mfu.mfu_flops / (4 * 989e12 * 0.5))


def test_collectives_are_compared_and_others_counted(tmp_path, capsys) -> None:
    """One that takes what the profile says, and is issued, has no error; one twice as long is priced at half."""
    collectives = importlib.import_module("published_collectives")
    took_s = collectives.seconds(collectives.load_profile("dgx-h100"), "all_gather", 2, 8, 2**30) + collectives.ISSUE_S
    cells = {"gpu": "H100 SXM", "nodes": "2", "gpus": "16", "collective": "all_gather", "size_bytes": str(2**30)}
    lines = [cells | {"time_us": f"{took_s * 1e6 * times!r}"} for times in (1, 2)]
    lines += [cells, cells | {"gpu": "V100"}, cells | {"gpus": "3"}, cells | {"time_us": "5", "collective": "sendrecv"}]
    lines += [cells | {"time_us": "5", "algo": "Ring (forced)"}]
    columns = ("gpu", "nodes", "gpus", "collective", "size_bytes", "time_us", "algo")
    data = write(tmp_path / "collectives.csv", *lines, columns=columns)
    assert published.main(["--collectives", data]) == 0
    table, _, left_out = capsys.readouterr().out.partition("Left out")
    by_size, _, by_hosts = table.partition("collective and hosts")
    for text in ("several hosts  1 GB to 10 GB", "-25%      25%    -50%"):
        assert text in by_size
    assert "2 hosts, large" in by_hosts
    for reason in (
        "neither time nor rate",
        "no profile of V100",
        "3 ranks on 2 hosts",
        "collective 'sendrecv'",
        "made",
    ):
        assert reason in left_out


def test_what_a_host_takes_to_issue_is_no_part_of_a_price(tmp_path) -> None:
    """A latency that includes a launch is one of small messages; what large messages leave is not compared alone."""
    collectives, rows = importlib.import_module("published_collectives"), importlib.import_module("published_rows")
    cells = {"gpu": "H100 SXM", "nodes": "1", "gpus": "8", "latency_us": "160", "peak_algbw_gbs": "400"}
    noted = cells | {"note": "latency includes host launch", "algo": "auto (NVLSTree unavailable)"}
    lines = [cells | {"collective": "all_gather"}]
    lines += [noted | {"collective": kind} for kind in ("all_gather", "all_to_all")]
    columns = ("gpu", "nodes", "gpus", "collective", "latency_us", "peak_algbw_gbs", "algo", "note")
    data = rows.read_rows(tmp_path / write(tmp_path / "collectives.csv", *lines, columns=columns))
    (plain,), gathers, exchanges = (collectives.points_of(row) for row in data)
    assert (plain.profile, plain.size_bytes, plain.issue_s) == ("dgx-h100", 2**30, 0.0)
    assert [point.size_bytes for point in gathers] == [2**12, 2**30]
    assert {point.profile for point in gathers} == {"h100-500w-hbm2e"}
    assert {point.issue_s for point in gathers} == {collectives.ISSUE_OF_FITS_S}
    assert {point.issue_s for point in exchanges} == {collectives.ISSUE_S}


def test_constants_of_links_are_found_again() -> None:
    """Times that a profile's switch and a host make give the switch's launch and rate, and the host's part."""
    links = importlib.import_module("published_links")
    fit = next(each for each in links.FITS if each.profile == "dgx-h200")
    profile = links.load_profile("dgx-h200")
    true = {"launch": 20e-6, "share": 0.5, "issue": 10e-6}
    made = links.replace(profile, network=fit.change(profile.network, true))
    sizes = [2.0**power for power in range(12, 34)]
    took_s = [links.seconds(made, "all_reduce", 1, 8, size) + true["issue"] for size in sizes]
    points = [links.Point("dgx-h200", "all_reduce", 1, 8, size, s, 1e-6) for size, s in zip(sizes, took_s)]
    found = links.fitted(fit, points)
    assert found == pytest.approx(true, rel=0.05)
    assert links.loss(fit, profile, found, points) < 0.01 < links.loss(fit, profile, fit.first, points)


def slow(one: object) -> object:
    time.sleep(60)
    return one


def killed(one: object) -> object:
    os.kill(os.getpid(), signal.SIGKILL)
    return one


def confused(one: object) -> object:
    raise KeyError("what")


@pytest.mark.parametrize(
    ("work", "reason"), [(slow, "more than 0.2 s"), (killed, "ended with -9"), (confused, "KeyError: 'what'")]
)
def test_a_row_that_fails_or_takes_too_long_stops_no_other(work, reason: str) -> None:
    seconds = 0.2 if work is slow else 60.0
    found = list(jobs.outcomes([run(), run(id="next")], work, seconds))
    assert [outcome.run.name for outcome in found] == ["tiny-eager", "next"]
    assert all(reason in outcome.found for outcome in found)
