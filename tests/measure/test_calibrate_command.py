"""``autoshard calibrate``: mistakes end with one line before any rank waits; a real run writes all it promises."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autoshard.cli.commands import app
from cost_models import load_profile
from cost_models.samples import read_samples

ROOT = Path(__file__).resolve().parent.parent.parent
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
ENVIRONMENT |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def run(*arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env=ENVIRONMENT | environment,
        timeout=120,
    )


MISTAKES = {
    "no torchrun": ("--mesh dp=2 -o p.yaml", "start it with torchrun --nproc-per-node 2"),
    "no mesh": ("-o p.yaml", "needs --mesh and --output"),
    "no output": ("--mesh dp=2", "needs --mesh and --output"),
    "mesh": ("--mesh dp2 -o p.yaml", "cannot read the mesh 'dp2'"),
    "device": ("--mesh dp=2 -o p.yaml --device tpu", "'tpu' is no device"),
    "profile missing": ("--check none.yaml", "there is no such file"),
    "profile of no mesh": ("--check dgx-h100", "say with --mesh which one to check"),
    "tolerance": ("--check dgx-h100 --mesh dp=2 --tolerance nan", "the tolerance nan is no share"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_ends_with_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    arguments, said = MISTAKES[mistake]
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["calibrate", *arguments.split()])
    assert done.exit_code == 2
    assert said in done.stderr and done.stderr.count("\n") == 1
    assert done.stdout == "" and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("rank", "begun"), [("0", "error: "), ("1", "error on rank 1: ")])
def test_a_rank_that_outlives_the_first_one_speaks_for_itself(tmp_path: Path, rank: str, begun: str) -> None:
    said = f"{begun}the job has 2 ranks, fewer ranks than the mesh"
    arguments = ("-m", "autoshard", "calibrate", "--mesh", "dp=2,tp=2", "-o", "p.yaml")
    done = run(*arguments, folder=tmp_path, RANK=rank, WORLD_SIZE="2")
    assert (done.returncode, done.stdout, done.stderr[: len(said)]) == (2, "", said)
    assert done.stderr.count("\n") == 1


TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node 2 -m autoshard calibrate".split()


def torchrun(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run(*TORCHRUN, *arguments, folder=folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", ["a rank is killed", pytest.param("the job is interrupted", marks=pytest.mark.thorough)]
)
def test_a_job_that_ends_early_says_so_once_and_keeps_samples_and_profile(tmp_path: Path, how: str) -> None:
    (tmp_path / "p.yaml").write_text("provenance: a good profile")
    command = (*TORCHRUN, "--mesh", "dp=2", "-o", "p.yaml", "--quick", "--max-bytes", "65536")
    with subprocess.Popen(
        [sys.executable, *command], cwd=tmp_path, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
    ) as job:
        try:
            ranks = _wait_for_samples(job.pid, tmp_path / "p.samples.jsonl")
            if how == "a rank is killed":
                os.kill(ranks[-1], signal.SIGKILL)
            else:
                job.send_signal(signal.SIGINT)
            _, said = job.communicate(timeout=60)
        finally:
            job.kill()
    kept = len(read_samples(tmp_path / "p.samples.jsonl").samples)
    assert job.returncode != 0 and kept > 0
    assert said.count("error: ") == 1
    assert f"{kept} samples are kept in p.samples.jsonl, and the same command continues behind them" in said
    assert (tmp_path / "p.yaml").read_text() == "provenance: a good profile"


def _wait_for_samples(job: int, path: Path) -> list[int]:
    """The ranks of a job, once the first has written samples."""
    deadline = time.monotonic() + 90
    while not (path.exists() and path.read_bytes().count(b"\n") > 10):
        assert time.monotonic() < deadline, "no samples were written"
        time.sleep(0.1)
    return [int(pid) for pid in Path(f"/proc/{job}/task/{job}/children").read_text().split()]


@pytest.mark.slow
def test_a_run_writes_profile_samples_and_report_and_prints_them_once(tmp_path: Path) -> None:
    small = "--quick --max-bytes 4096 --budget 0 --report report".split()
    done = torchrun(tmp_path, "--mesh", "dp=2", "-o", "p.yaml", *small)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("wrote p.yaml") == 1
    assert "\x1b" not in done.stdout + done.stderr  # no bar and no colours in a pipe
    assert load_profile(str(tmp_path / "p.yaml")).topology(("dp",), (2,)).collective_s("all_gather", 0, 4096) > 0
    assert read_samples(tmp_path / "p.samples.jsonl").complete
    names = {path.name for path in (tmp_path / "report").iterdir()}
    assert names == {"report.html", "collectives-dp.svg", "kernels.svg"}
    text = (tmp_path / "report" / "report.html").read_text()
    assert text.count("<svg ") == 2
    assert "all_reduce" in text and "<script" not in text

    checked = torchrun(tmp_path, "--check", "p.yaml", "--tolerance", "1e9")
    assert checked.returncode == 0, checked.stderr
    assert checked.stdout.startswith("p.yaml fits")
    checked = torchrun(tmp_path, "--check", "p.yaml", "--tolerance", "1e-9")
    assert checked.returncode != 0
    assert checked.stdout.startswith("p.yaml does not fit") and "measured / predicted" in checked.stdout
    assert "exitcode  : 4" in checked.stderr
