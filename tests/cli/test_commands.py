from __future__ import annotations

import json
import os
import pty
import re
import shlex
import subprocess
import sys
import types
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from autoshard.cli.command_help import EXAMPLES
from autoshard.cli.commands import Dtype, Objective, app
from autoshard.cli.written_files import WRITTEN
from autoshard.constraints.baselines import baselines
from autoshard.errors import BudgetError, CaptureError, ContradictionError, InfeasibleError
from autoshard.mesh import Mesh
from autoshard.plans import Contender, Contest, contest_json, read_plan, summary_json, write_plan
from autoshard.precision import FLOATING_DTYPES
from cost_models import OPTIMIZERS, PRESETS, load_profile
from solver import BACKENDS

from ..plans.synthetic import sharded_plan, transformer_plan, undivided

ROOT = Path(__file__).parents[2]
PLAN = transformer_plan(2)
MODEL = "def model():\n    return (lambda x: x), (1,), {'mask': 2}\n"


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model and a plan, which is the current one."""
    (tmp_path / "model.py").write_text(MODEL)
    write_plan(PLAN, tmp_path / "plan.yaml")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


@pytest.fixture
def calls(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What ``api.plan`` is called with; it always gives the same plan."""
    seen: list[tuple[Any, ...]] = []

    def plan(module: object, args: object, kwargs: object, **options: Any) -> object:
        options.pop("progress")("solving")
        seen.append((args, kwargs, options))
        return PLAN

    fake_api(monkeypatch, plan)
    return seen


def fake_api(monkeypatch: pytest.MonkeyPatch, plan: Callable[..., object]) -> None:
    fake = types.ModuleType("autoshard.api")
    fake.plan = plan  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "autoshard.api", fake)


def test_plan_passes_its_defaults(calls: list[tuple[Any, ...]]) -> None:
    result = invoke("plan", "model.py:model", "--mesh", "dp=2,tp=2", "-o", "new.yaml")
    assert result.exit_code == 0
    assert calls == [
        (
            (1,),
            {"mask": 2},
            {
                "mesh": Mesh.parse("dp=2,tp=2"),
                "hardware": "dgx-h100",
                "objective": "step-time",
                "constraints": (),
                "pins": (),
                "held_as": None,
                "evaluation": False,
                "backend": "auto",
                "time_limit_s": None,
                "tie_layers": True,
                "checkpointing": "free",
                "micro_batches": 1,
                "bucket": 25 << 20,
                "param_dtype": None,
                "reduce_dtype": None,
                "memory": None,
                "memory_soft": None,
                "optimizer": None,
                "against": None,
                "name": "model.py:model",
                "cache": True,
            },
        )
    ]


def test_plan_passes_what_it_is_given(calls: list[tuple[Any, ...]]) -> None:
    options = "--hardware cpu-gloo --objective communication-time --backend highs --time-limit 2.5".split()
    options += (
        "--held-as plan.yaml --memory 80GiB --memory-soft 2.5 --optimizer sgd --micro-batches 4 --bucket 1MiB".split()
    )
    options += "--param-dtype bfloat16 --reduce-dtype float32 --evaluation --no-cache --against experts".split()
    pins = ["--pin", "tokens=dp:S(0) tp:R", "--pin", "*.wq.weight=tp:S(0)"]
    result = invoke("plan", "model.py:model", "--mesh", "a=3", "--output", "new.yaml", *options, *pins)
    assert result.exit_code == 0
    given = calls[0][2]
    assert given["pins"] == ("tokens=dp:S(0) tp:R", "*.wq.weight=tp:S(0)")
    assert (given["hardware"], given["objective"]) == ("cpu-gloo", "communication-time")
    assert (given["backend"], given["time_limit_s"]) == ("highs", 2.5)
    assert (given["memory"], given["memory_soft"], given["optimizer"]) == ("80GiB", 2.5, "sgd")
    assert (given["micro_batches"], given["bucket"], given["held_as"]) == (4, 1 << 20, PLAN)
    assert (given["evaluation"], given["cache"], given["against"]) == (True, False, "experts")
    assert (given["param_dtype"], given["reduce_dtype"]) == ("bfloat16", "float32")


def test_plan_writes_the_file_and_says_what_it_is_worth(calls: list[tuple[Any, ...]]) -> None:
    result = invoke("plan", "model.py:model", "--mesh", "dp=2,tp=2", "-o", "new.yaml")
    assert read_plan("new.yaml") == PLAN
    assert result.stdout == (
        "wrote new.yaml\n"
        "optimal with identical layers decided alike: cost 1083848 ns, bound 1083848 ns, gap 0.000%\n"
        "predicted step 1.084 ms: compute 953.8 us, communication 87.54 us, optimizer 42.5 us\n"
        "parameters 1.502 MiB, 1.002 MiB on the rank with the largest shards\n"
        "memory per rank 4.508 MiB (budget 5 MiB), fullest in the backward at layers.1.attention.wo/mm.1; "
        "parameters, gradients and adamw state 4.008 MiB\n"
        "predicted throughput of all ranks: 3,691 samples/s, 472,391 tokens/s (4 samples and 512 tokens in 1.084 ms); "
        "MFU 44%\n"
        "along dp, 2 ranks: 67% replicated, 33% data parallel; it cuts the batch; of the parameters 67% whole on each, "
        "33% whole on each (gradients all-reduced)\n"
        "along tp, 2 ranks: 67% tensor parallel, 33% replicated; every rank reads the whole batch; of the parameters "
        "67% cut over it and used so, 33% whole on each\n"
        "pin tokens=dp:S(0) tp:R\n"
        "not in these times: launches of kernels beyond the profile's, reading data, and what slows down while "
        "something else runs beside it\n"
    )
    assert result.stderr == ""


def test_plan_says_loudly_that_ranks_do_the_same_work(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_api(monkeypatch, lambda *given, **options: undivided(PLAN))
    result = invoke("plan", "model.py:model", "--mesh", "dp=2,tp=2", "-o", "new.yaml")
    assert "\nWARNING: nothing is divided along dp and tp: 4 ranks do the same work." in result.stdout


MISTAKES = {
    "mesh": (["--mesh", "dp2"], "error: cannot read the mesh 'dp2'; write axis=size"),
    "folder": (["-o", "none/new.yaml"], "error: cannot write the plan none/new.yaml: there is no folder"),
    "file missing": (["none.py:model"], "error: cannot load the model 'none.py:model': there is no file none.py"),
    "name missing": (["model.py:modle"], "did you mean 'model'?"),
    "hardware": (["--hardware", "none"], "none"),
    "backend": (["--backend", "none"], "unknown backend 'none'"),
    "hardware that is a folder": (["--hardware", "."], "hardware profile . is a folder; give the file in it"),
    "objective": (["--objective", "none"], "communication-time"),
    "time limit": (["--time-limit", "0"], "give seconds above 0"),
    "optimizer": (["--optimizer", "adam"], "unknown optimizer policy 'adam'; choose one of adamw, sgd"),
    "time limit nan": (["--time-limit", "nan"], "give seconds above 0"),
    "bucket": (["--bucket", "abc"], "the bucket: cannot read the size 'abc'; write a number and a unit"),
    "bucket below 0": (["--bucket", "-1"], "the bucket: cannot read the size '-1'"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_ends_with_one_line_and_exit_code_2(calls: list[tuple[Any, ...]], mistake: str) -> None:
    given, said = MISTAKES[mistake]
    model = [] if given[0].startswith("-") else given
    options = given if not model else []
    result = invoke("plan", *(model or ["model.py:model"]), "--mesh", "dp=2", "-o", "new.yaml", *options)
    assert result.exit_code == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert calls == []
    assert not Path("new.yaml").exists()


def test_a_profile_measured_on_another_mesh_is_refused_before_the_long_work(calls: list[tuple[Any, ...]]) -> None:
    link = "{size: 2, name: x, launch_s: 1e-4, latency_s: 0, bandwidth_bytes_per_s: 1e9}"
    lines = ["version: 2", "name: mine", "based_on: cpu-gloo", "provenance: a test", f"axes: {{dp: {link}}}"]
    Path("mine.yaml").write_text("\n".join(lines) + "\n")
    arguments = ("plan", "model.py:model", "--hardware", "mine.yaml", "-o", "new.yaml", "--mesh")
    refused = invoke(*arguments, "dp=4")
    assert refused.exit_code == 2 and calls == []
    assert "'mine': it was measured on the mesh dp=2 and has no links for dp=4" in refused.stderr
    assert "autoshard calibrate --mesh dp=4" in refused.stderr
    assert invoke(*arguments, "dp=2").exit_code == 0 and len(calls) == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InfeasibleError("no plan fits"), 3),
        (ContradictionError("the pin 'x=dp:R' contradicts the pin 'x=dp:S(0)'"), 3),
        (BudgetError("no plan fits 1 GiB"), 2),
        (CaptureError("model.py:2 branches on data"), 2),
    ],
    ids=["infeasible", "contradiction", "budget", "capture"],
)
def test_an_error_of_the_library_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int
) -> None:
    def plan(*args: object, **kwargs: object) -> object:
        raise error

    fake_api(monkeypatch, plan)
    before = Path("plan.yaml").read_bytes()
    result = invoke("plan", "model.py:model", "--mesh", "dp=2", "-o", "plan.yaml")
    assert (result.exit_code, result.stderr) == (code, f"error: {error}\n")
    assert Path("plan.yaml").read_bytes() == before


def test_a_defect_of_ours_keeps_its_traceback(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(*args: object, **kwargs: object) -> object:
        raise AssertionError("ours")

    fake_api(monkeypatch, plan)
    assert isinstance(invoke("plan", "model.py:model", "--mesh", "dp=2", "-o", "new.yaml").exception, AssertionError)


def test_a_warning_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(*args: object, **kwargs: object) -> object:
        warnings.simplefilter("always")
        warnings.warn("aten.odd is replicated", stacklevel=1)
        return PLAN

    fake_api(monkeypatch, plan)
    result = invoke("plan", "model.py:model", "--mesh", "dp=2", "-o", "new.yaml")
    assert (result.exit_code, result.stderr) == (0, "warning: aten.odd is replicated\n")


def test_plan_takes_constraints_and_a_baseline(calls: list[tuple[Any, ...]]) -> None:
    options = ["--constraint", "forbid all_gather over tp of activations", "--baseline", "fsdp+tp"]
    result = invoke("plan", "model.py:model", "--mesh", "dp=2,tp=2", "-o", "new.yaml", *options)
    assert result.exit_code == 0
    expected = ("forbid all_gather over tp of activations", "family dp=fsdp", "family tp=tp")
    assert calls[0][2]["constraints"] == expected
    options[-1] += "/selective"
    assert invoke("plan", "model.py:model", "--mesh", "dp=2,tp=2", "-o", "new.yaml", *options).exit_code == 0
    assert calls[1][2]["constraints"] == (*expected, "recomputation selective")


def test_marks_of_the_model_count_unless_they_are_not_to(calls: list[tuple[Any, ...]]) -> None:
    for options in ([], ["--checkpointing", "none"]):
        assert invoke("plan", "model.py:model", "--mesh", "dp=2", "-o", "new.yaml", *options).exit_code == 0
    assert [call[2]["checkpointing"] for call in calls] == ["free", "none"]


def test_an_unknown_baseline_is_a_mistake(calls: list[tuple[Any, ...]]) -> None:
    result = invoke("plan", "model.py:model", "--mesh", "dp=2", "-o", "new.yaml", "--baseline", "hsdp")
    assert (result.exit_code, result.stdout, calls) == (2, "", [])
    assert "on the mesh dp=2 there are ddp, fsdp, tp, sp, cp, ep" in result.stderr


def fake_comparison(monkeypatch: pytest.MonkeyPatch, contest: Contest) -> list[dict[str, Any]]:
    seen: list[dict[str, Any]] = []

    def compare(module: object, args: object, kwargs: object, **options: Any) -> Contest:
        options.pop("progress")("planning")
        seen.append(options)
        return contest

    fake = types.ModuleType("autoshard.planning.comparison")
    fake.compare = fake.against_experts = compare  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "autoshard.planning.comparison", fake)
    return seen


CONTEST = Contest(
    Contender("optimum", "least predicted time", PLAN),
    (
        Contender("ddp", "data parallel", PLAN),
        Contender("ddp/full", "data parallel, full recomputation", PLAN),
        Contender("ep", "expert parallel", None, "it has no experts"),
    ),
)


def test_compare_prints_a_table_or_json_and_writes_the_plans(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = fake_comparison(monkeypatch, CONTEST)
    arguments = ["compare", "model.py:model", "--mesh", "dp=2,tp=2", "--hardware", "cpu-gloo"]
    table = invoke(*arguments, "--plans", "plans/all")
    assert table.exit_code == 0, table.stderr
    assert "it has no experts" in table.stdout and "data parallel" in table.stdout
    assert sorted(path.name for path in Path("plans/all").iterdir()) == ["ddp-full.yaml", "ddp.yaml", "optimum.yaml"]
    assert read_plan("plans/all/ddp.yaml") == PLAN
    found = json.loads(invoke(*arguments, "--format", "json", "--time-limit", "3", "--checkpointing", "none").stdout)
    assert found == json.loads(json.dumps(contest_json(CONTEST)))
    assert (seen[0]["mesh"], seen[0]["hardware"], seen[1]["time_limit_s"]) == (Mesh.parse("dp=2,tp=2"), "cpu-gloo", 3.0)
    assert [options["checkpointing"] for options in seen] == ["free", "none"]


def test_compare_refuses_a_folder_that_is_a_file_before_it_plans(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = fake_comparison(monkeypatch, CONTEST)
    result = invoke("compare", "model.py:model", "--mesh", "dp=2,tp=2", "--plans", "plan.yaml")
    assert result.exit_code == 2 and "cannot make the folder plan.yaml" in result.stderr and not seen


def test_the_objectives_are_those_of_the_formulation() -> None:
    pytest.importorskip("torch")
    from autoshard.planning import OBJECTIVES

    assert tuple(objective.value for objective in Objective) == OBJECTIVES


def test_the_dtypes_are_those_of_a_precision() -> None:
    assert tuple(dtype.value for dtype in Dtype) == FLOATING_DTYPES


def test_show_prints_tables_or_json(folder: Path) -> None:
    assert "layers.*.attention.wq.weight" in invoke("show", "plan.yaml").stdout
    assert json.loads(invoke("show", "plan.yaml", "--format", "json").stdout) == summary_json(PLAN)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["none.yaml"], "error: cannot read the plan none.yaml: no such file or directory; check the path"),
        (["model.py"], "error: model.py"),
        (["plan.yaml", "--format", "xml"], "xml"),
        ([], "PLAN"),
    ],
)
def test_show_explains_a_mistake(folder: Path, arguments: list[str], said: str) -> None:
    result = invoke("show", *arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("format", ["text", "json", "markdown"])
def test_diff_says_by_its_exit_code_whether_plans_differ(folder: Path, format: str) -> None:
    write_plan(sharded_plan(2), "other.yaml")
    same, different = (invoke("diff", "plan.yaml", name, "--format", format) for name in ("plan.yaml", "other.yaml"))
    assert (same.exit_code, different.exit_code) == (0, 1)
    assert same.stdout and "layers.*.attention.wq.weight" in different.stdout.replace("\\", "")
    assert (same.stderr, different.stderr) == ("", "")


def test_report_writes_one_page_and_a_trace(folder: Path) -> None:
    result = invoke("report", "plan.yaml", "-o", "report.html", "--trace", "trace.json", "--baseline", "plan.yaml")
    assert (result.exit_code, result.stdout) == (0, "wrote report.html\nwrote trace.json\n")
    assert Path("report.html").read_text().startswith("<!doctype html>")
    assert json.loads(Path("trace.json").read_text())["traceEvents"]
    assert sorted(path.name for path in folder.iterdir()) == ["model.py", "plan.yaml", "report.html", "trace.json"]


def test_report_compares_two_plans_on_one_page(folder: Path) -> None:
    write_plan(sharded_plan(2), "other.yaml")
    result = invoke("report", "plan.yaml", "other.yaml", "-o", "report.html")
    assert (result.exit_code, result.stdout) == (0, "wrote report.html\n")
    page = Path("report.html").read_text()
    assert "plan.yaml" in page and "other.yaml" in page and "What changes from" in page
    for wrong in (["plan.yaml"] * 3, ["plan.yaml"] * 2 + ["--trace", "t.json"]):
        refused = invoke("report", *wrong, "-o", "no.html")
        assert refused.exit_code == 2 and "were given" in refused.stderr and not Path("no.html").exists()


def test_a_report_says_what_the_axes_of_the_mesh_run_on(folder: Path) -> None:
    plan = replace(sharded_plan(2), hardware="dgx-h100", hardware_fingerprint=load_profile("dgx-h100").fingerprint)
    write_plan(plan, "known.yaml")
    write_plan(replace(plan, hardware="ours"), "unknown.yaml")

    def page(*arguments: str) -> str:
        assert invoke("report", *arguments, "-o", "r.html").exit_code == 0
        return Path("r.html").read_text()

    assert "dp inside a host of 8, on NVLink 4, 450 GB/s a device" in page("known.yaml")
    assert "the profile is not at hand" in page("unknown.yaml")
    assert "another version of tpu-v5e" in page("unknown.yaml", "--hardware", "tpu-v5e")
    refused = invoke("report", "known.yaml", "-o", "r.html", "--hardware", "none.yaml")
    assert refused.exit_code == 2 and "none.yaml" in refused.stderr


def test_export_writes_python_to_a_file_or_to_standard_output(folder: Path) -> None:
    printed = invoke("export", "plan.yaml", "--to", "partition-spec")
    written = invoke("export", "plan.yaml", "--to", "partition-spec", "-o", "specs.py")
    assert (written.exit_code, written.stdout) == (0, "wrote specs.py\n")
    assert printed.stdout == Path("specs.py").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["diff", "plan.yaml", "none.yaml"], "cannot read the plan none.yaml: no such file"),
        (["diff", "plan.yaml", "model.py"], "error: model.py"),
        (["diff", "plan.yaml"], "NEW"),
        (["report", "none.yaml", "-o", "r.html"], "cannot read the plan none.yaml"),
        (["report", "plan.yaml", "-o", "none/r.html"], "cannot write the report none/r.html: there is no folder"),
        (["report", "plan.yaml", "-o", "r.html", "--trace", "."], "cannot write the trace .: it is a folder"),
        (["report", "plan.yaml", "-o", "r.html", "--baseline", "none.yaml"], "cannot read the plan none.yaml"),
        (["report", "plan.yaml"], "--output"),
        (["export", "plan.yaml", "--to", "cuda"], "partition-spec"),
        (["export", "plan.yaml", "--to", "partition-spec", "-o", "none/x.py"], "cannot write the export none/x.py"),
    ],
    ids=str,
)
def test_reviewing_explains_a_mistake(folder: Path, arguments: list[str], said: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["model.py", "plan.yaml"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "autoshard", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("plan model.py:model --mesh dp=2 -o ./model.py", "--output would write over model.py, which FILE.py:FACTORY"),
        (
            "plan model.py:model --mesh dp=2 --hardware link.yaml -o plan.yaml",
            "link.yaml, which --hardware has it read",
        ),
        ("plan model.py:model --mesh dp=2 --held-as plan.yaml -o link.yaml", "over plan.yaml, which --held-as"),
        ("plan model.py:model --mesh dp=2 --constraints plan.yaml -o plan.yaml", "over plan.yaml, which --constraints"),
        ("report plan.yaml -o plan.yaml", "--output would write over plan.yaml, which PLAN [OTHER] has it read"),
        ("report plan.yaml -o r.html --trace plan.yaml", "--trace would write over plan.yaml"),
        ("report plan.yaml --baseline link.yaml -o plan.yaml", "over plan.yaml"),
        ("report plan.yaml -o both.html --trace ./both.html", "--output and --trace both name both.html"),
        ("export plan.yaml --to partition-spec -o plan.yaml", "over plan.yaml, which PLAN has it read"),
        ("explain plan.yaml --why x -o plan.yaml", "over plan.yaml, which PLAN has it read"),
        ("replan plan.yaml model.py:model -o model.py", "over model.py, which FILE.py:FACTORY has it read"),
        ("search model.py:model --devices 4 -o model.py", "over model.py"),
        ("compare model.py:model --mesh dp=2 --plans model.py", "--plans would write over model.py"),
        ("calibrate --mesh dp=2 -o new.yaml --samples new.yaml", "--output and --samples both name new.yaml"),
    ],
)
def test_what_would_write_over_what_it_reads_is_refused_at_once(folder: Path, command: str, said: str) -> None:
    (folder / "link.yaml").symlink_to("plan.yaml")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    result = invoke(*command.split())
    assert result.exit_code == 2 and said in result.stderr and result.stderr.count("\n") == 1
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (
            "plan model.py:model --mesh dp=2 -o train.py",
            "--output would write over train.py, which holds no plan; name",
        ),
        ("report plan.yaml -o train.py", "over train.py, which holds no report"),
        ("report plan.yaml -o r.html --trace train.py", "--trace would write over train.py, which holds no trace"),
        ("export plan.yaml --to partition-spec -o train.py", "which holds no export"),
        ("explain plan.yaml --why x -o train.py", "which holds no plan"),
        ("replan plan.yaml -o train.py", "which holds no plan"),
        ("calibrate --mesh dp=2 -o plan.yaml", "--output would write over plan.yaml, which holds no profile"),
        ("calibrate --mesh dp=2 -o new.yaml --report plan.yaml", "which holds no report"),
    ],
)
def test_a_file_of_another_kind_is_not_written_over(folder: Path, command: str, said: str) -> None:
    (folder / "train.py").write_text("import autoshard\n")
    result = invoke(*command.split())
    assert result.exit_code == 2 and said in result.stderr and result.stderr.count("\n") == 1
    assert (folder / "train.py").read_text() == "import autoshard\n"


@pytest.mark.parametrize(
    ("size", "said"),
    [
        ("1MiBs", "--max-bytes: cannot read the size '1MiBs'; write a number and a unit"),
        ("4095", "--max-bytes 4095 is less than the 4096 bytes"),
        ("1MiB", "start it with torchrun"),
    ],
)
def test_the_largest_buffer_of_a_calibration_is_a_size_as_any(folder: Path, size: str, said: str) -> None:
    result = run("calibrate", "--mesh", "dp=2", "-o", str(folder / "new.yaml"), "--max-bytes", size)
    assert result.returncode == 2 and said in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["report plan.yaml -o again", "export plan.yaml --to partition-spec -o again"])
def test_what_was_written_and_an_empty_file_are_written_over(folder: Path, command: str) -> None:
    (folder / "again").write_text("")
    for _ in range(2):
        assert invoke(*command.split()).exit_code == 0 and (folder / "again").stat().st_size > 1000


def test_every_option_that_writes_a_file_is_known_as_one() -> None:
    commands = typer.main.get_command(app).commands.values()
    assert {each.name for command in commands for each in command.params} >= WRITTEN
    told = {each.name for command in commands for each in command.params if "write" in (each.help or "").lower()}
    assert told - {"quick"} <= WRITTEN | {"path", "paths"}


def test_the_module_runs_as_a_program(folder: Path) -> None:
    assert run("--version").stdout.startswith("autoshard")
    assert {"plan", "show", "diff", "report", "export"} <= set(run("--help").stdout.split())
    assert run("show", "none.yaml").returncode == 2
    piped = run("show", "plan.yaml")
    assert (piped.returncode, piped.stderr) == (0, "")
    assert "\x1b" not in piped.stdout


def test_what_native_code_prints_is_no_part_of_the_output(folder: Path) -> None:
    """Neither on a descriptor nor in the buffer of C's own, which is written when the process ends."""
    program = (
        "import ctypes, os\n"
        "from autoshard.cli import commands\n"
        "from autoshard.__main__ import main\n"
        "command = commands.main\n"
        "def noisy():\n"
        "    os.write(1, b'noise of a descriptor\\n')\n"
        "    ctypes.CDLL(None).puts(b'noise of C')\n"
        "    command()\n"
        "import autoshard.cli\n"
        "autoshard.cli.main = noisy\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "show", "plan.yaml", "--format", "json"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0 and json.loads(done.stdout)
    assert sorted(done.stderr.splitlines()) == ["noise of C", "noise of a descriptor"]


def test_a_terminal_gets_colours(folder: Path) -> None:
    leader, follower = pty.openpty()
    environment = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR")}
    with subprocess.Popen(
        [sys.executable, "-m", "autoshard", "show", "plan.yaml"],
        stdout=follower,
        env=environment | {"PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "COLUMNS": "80"},
    ):
        os.close(follower)
        shown = b""
        while chunk := _read(leader):
            shown += chunk
    os.close(leader)
    assert b"\x1b[1m" in shown


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:  # how Linux says that the other end is closed
        return b""


def test_a_reader_that_leaves_early_gets_no_traceback(folder: Path) -> None:
    command = f"{sys.executable} -m autoshard show plan.yaml | head -n 1"
    done = subprocess.run(
        command, shell=True, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "command", ["show plan.yaml", "diff plan.yaml plan.yaml", "show plan.yaml --format json", "--help"]
)
def test_output_that_takes_no_more_is_no_difference_and_no_traceback(folder: Path, command: str) -> None:
    """Exit code 1 would say that two plans differ."""
    autoshard = [sys.executable, "-m", "autoshard", *command.split()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with open("/dev/full", "w") as full:
        done = subprocess.run(autoshard, stdout=full, stderr=subprocess.PIPE, text=True, env=environment, timeout=60)
    assert (done.returncode, done.stderr) == (2, "error: cannot write to standard output: No space left on device\n")
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(autoshard, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("loading", ["pydantic", "rich", "typer", "autoshard.plans", "autoshard.cli.commands"])
def test_an_interruption_while_libraries_load_ends_in_silence(folder: Path, loading: str) -> None:
    program = (
        "import sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, *rest):\n"
        f"        if name == {loading!r}: raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "from autoshard.__main__ import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "show", "plan.yaml"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_an_interruption_that_native_code_makes_an_error_of_ends_in_silence(folder: Path) -> None:
    program = (
        "import os, signal, sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'autoshard.plans':\n"
        "            try: os.kill(os.getpid(), signal.SIGINT)\n"
        "            except KeyboardInterrupt: raise ValueError('SchemaError: KeyboardInterrupt') from None\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "from autoshard.__main__ import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "show", "plan.yaml"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_an_interruption_while_it_plans_leaves_the_plan_that_was_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan(*model: object, **options: object) -> object:
        raise KeyboardInterrupt

    fake_api(monkeypatch, plan)
    result = invoke("plan", "model.py:model", "--mesh", "dp=2", "-o", "plan.yaml")
    assert result.exit_code == 130 and read_plan("plan.yaml") == PLAN


def test_every_command_has_examples_that_it_takes() -> None:
    group = typer.main.get_command(app)
    assert EXAMPLES.keys() == group.commands.keys()
    for name, lines in EXAMPLES.items():
        for line in lines:
            _, _, given = line.partition(f"autoshard {name} ")
            group.commands[name].make_context(name, shlex.split(given))  # refuses options that it has not
            assert line in invoke(name, "--help").stdout


def test_help_lists_every_name_that_an_option_takes() -> None:
    shown = " ".join(invoke("plan", "--help").stdout.split())
    known = {base.name for mesh in ("a=2", "a=2,b=2") for base in baselines(Mesh.parse(mesh))}
    for name in (*known, *PRESETS, *OPTIMIZERS, *BACKENDS):
        assert re.search(rf"[ ,]{re.escape(name)}(,|$| )", shown), name


def test_names_stand_only_below_options_that_take_them() -> None:
    assert "fsdp" not in invoke("report", "--help").stdout  # whose --baseline is a plan file


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("pl", ["plan"]),
        ("plan --mem", ["--memory", "--memory-soft"]),
        ("plan --hardware dgx-h", ["dgx-h100", "dgx-h200"]),
        ("plan --baseline fsdp+t", ["fsdp+tp"]),
        ("search --optimizer sgd", ["sgd", "sgd-momentum"]),
        ("explain --backend hi", ["highs"]),
        ("check --hardware cpu", ["cpu-gloo"]),
        ("show --format j", ["json"]),
    ],
)
def test_a_shell_completes_commands_options_and_names(typed: str, completed: list[str]) -> None:
    words = {"COMP_WORDS": f"autoshard {typed}", "COMP_CWORD": str(len(typed.split()))}
    asked = os.environ | words | {"_AUTOSHARD_COMPLETE": "complete_bash", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-m", "autoshard"], env=asked, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, completed, "")


def test_audit_prints_a_table_or_json(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from autoshard.planning.audit import Audit, AuditedOperator

    operators = (
        AuditedOperator("aten.sort.default", (), "no rule", 2, 0.0025, "model.py:7: x.sort()", "/sort"),
        AuditedOperator("aten.mm.default", ("torch", "autoshard"), "", 3, 0.5, "", "/mm"),
        AuditedOperator("aten.scalar_tensor.default", (), "", 1, 0.0, "", "/scalar_tensor"),
    )
    made = Audit(Mesh.parse("dp=2"), "cpu-gloo", operators)
    seen: list[dict[str, Any]] = []
    fake = types.ModuleType("autoshard.planning.audit")
    fake.audit = lambda *given, **options: seen.append(options) or made  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "autoshard.planning.audit", fake)

    arguments = ["audit", "model.py:model", "--mesh", "dp=2", "--hardware", "cpu-gloo"]
    lines = [re.split(r"\s{2,}", line.strip()) for line in invoke(*arguments).stdout.splitlines()]
    assert lines[2] == ["aten.sort.default", "none: no rule", "2", "2.5", "model.py:7: x.sort()"]
    assert lines[3] == ["aten.mm.default", "torch and autoshard", "3", "500", "/mm"]
    assert lines[4][1] == "a single number"
    assert lines[-1][0].startswith(
        "1 of 3 operators (2 of 6 calls) run whole on every rank of dp=2, which costs 2.5 ms"
    )
    found = json.loads(invoke(*arguments, "--format", "json").stdout)
    assert found["operators"][0]["lack"] == "no rule" and found["operators"][1]["sources"] == ["torch", "autoshard"]
    assert (seen[0]["mesh"], seen[0]["hardware"]) == (Mesh.parse("dp=2"), "cpu-gloo")


def test_audit_refuses_hardware_that_there_is_none_of(folder: Path) -> None:
    result = invoke("audit", "model.py:model", "--mesh", "dp=2", "--hardware", "none-such")
    assert result.exit_code == 2 and "none-such" in result.stderr and "Traceback" not in result.stderr
