"""The testbed of two hosts: it runs a command on 2 x 2 ranks over a shaped link, and leaves nothing behind, ever."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
TWO_HOSTS = (sys.executable, str(ROOT / "benchmarks" / "two_hosts.py"))
OF_TWO_RANKS = (*TWO_HOSTS, "--raw-seconds", "0", "--ranks-per-host", "1")
UNABLE = 77


def run(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TWO_HOSTS, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **options,  # type: ignore[call-overload]
    )


def hosts_of(pid: int) -> list[str]:
    """The namespaces of a run, by the id of its process."""
    done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [line.split()[0] for line in done.stdout.splitlines() if line.startswith(f"autoshard-{pid}-")]


def processes_named(marker: str) -> list[int]:
    """Processes that have a marker on their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


@pytest.fixture(scope="module")
def able(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skips, with the reason, where the hosts cannot be built."""
    script = tmp_path_factory.mktemp("able") / "script.py"
    script.write_text("")
    done = run("--raw-seconds", "0", "--ranks-per-host", "1", "--", str(script))
    if done.returncode == UNABLE:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr


RANKS = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(os.environ["RANK"])])
dist.all_reduce(total)
place = os.readlink("/proc/self/ns/net")
with open(f"{sys.argv[1]}/{os.environ['RANK']}", "w") as file:
    print(total.item(), place, os.environ["GROUP_RANK"], os.environ["TWO_HOSTS_RATE_BYTES_PER_S"],
          os.environ["TWO_HOSTS_RAW_BYTES_PER_S"], file=file)
dist.barrier()
os._exit(0)
"""


def test_four_ranks_meet_over_a_link_of_the_rate_that_was_asked_for(able: None, tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    with subprocess.Popen(
        [*TWO_HOSTS, "--rate", "80mbit", "--raw-seconds", "1", "--", str(script), str(tmp_path)]
    ) as job:
        assert job.wait(timeout=120) == 0
    ranks = [(tmp_path / str(rank)).read_text().split() for rank in range(4)]
    assert [rank[0] for rank in ranks] == ["6.0"] * 4
    assert [rank[2] for rank in ranks] == ["0", "0", "1", "1"]
    places = [rank[1] for rank in ranks]
    assert places[0] == places[1] != places[2] == places[3]
    assert {float(rank[3]) for rank in ranks} == {10e6}
    assert all(0 < float(rank[4]) < 1.1 * 10e6 for rank in ranks)  # what is shaped is never exceeded for a second
    assert hosts_of(job.pid) == []


def test_a_command_that_fails_gives_its_status_and_leaves_nothing(able: None, tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(3)\ntime.sleep(600)\n")
    with subprocess.Popen([*OF_TWO_RANKS, "--", str(script)], stderr=subprocess.PIPE, text=True) as job:
        _, said = job.communicate(timeout=120)
    assert job.returncode == 1, said
    assert hosts_of(job.pid) == [] and processes_named(str(script)) == []


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, pytest.param(signal.SIGHUP, marks=pytest.mark.thorough)]
)
def test_a_signal_takes_the_hosts_and_every_process_in_them_down(able: None, tmp_path: Path, number: int) -> None:
    script = tmp_path / "sleeps.py"
    script.write_text(f"import os, time\nopen(f'{tmp_path}/' + os.environ['RANK'], 'w')\ntime.sleep(600)\n")
    with subprocess.Popen([*OF_TWO_RANKS, "--", str(script)], stderr=subprocess.PIPE, text=True) as job:
        try:
            _wait_for([tmp_path / str(rank) for rank in range(2)])
            assert len(hosts_of(job.pid)) == 2
        finally:
            job.send_signal(number)
        _, said = job.communicate(timeout=60)
    assert job.returncode == 128 + number
    assert signal.Signals(number).name in said
    assert hosts_of(job.pid) == [] and processes_named(str(script)) == []


def test_a_command_past_its_time_is_ended(able: None, tmp_path: Path) -> None:
    script = tmp_path / "sleeps.py"
    script.write_text("import time\ntime.sleep(600)\n")
    with subprocess.Popen([*OF_TWO_RANKS, "--time-limit", "3", "--", str(script)], stderr=subprocess.PIPE) as job:
        job.communicate(timeout=60)
    assert job.returncode == 124
    assert hosts_of(job.pid) == [] and processes_named(str(script)) == []


def test_what_a_killed_run_left_is_taken_down_by_the_next(able: None, tmp_path: Path) -> None:
    script = tmp_path / "sleeps.py"
    script.write_text(f"import os, time\nopen(f'{tmp_path}/' + os.environ['RANK'], 'w')\ntime.sleep(600)\n")
    with subprocess.Popen([*OF_TWO_RANKS, "--", str(script)], stderr=subprocess.DEVNULL) as job:
        try:
            _wait_for([tmp_path / str(rank) for rank in range(2)])
        finally:
            job.kill()
    assert len(hosts_of(job.pid)) == 2
    (tmp_path / "nothing.py").write_text("")
    assert run(*OF_TWO_RANKS[2:], "--", str(tmp_path / "nothing.py")).returncode == 0
    assert hosts_of(job.pid) == [] and processes_named(str(script)) == []


def _wait_for(paths: list[Path]) -> None:
    deadline = time.monotonic() + 60
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.1)


def test_without_the_tools_it_says_so_and_ends_with_77(tmp_path: Path) -> None:
    done = run("--", "script.py", env=os.environ | {"PATH": str(tmp_path)})
    assert (done.returncode, done.stdout) == (UNABLE, "")
    assert done.stderr == "two_hosts: cannot build two hosts here: ip and tc not found; install iproute2\n"


NOBODY = """
import importlib.util, os, sys
spec = importlib.util.spec_from_file_location("two_hosts", sys.argv[0])
module = sys.modules["two_hosts"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
if os.geteuid() == 0:
    os.setuid(65534)  # only now: another user may not be able to read our Python
sys.exit(module.main())
"""


@pytest.mark.skipif(not (shutil.which("ip") and shutil.which("tc")), reason="ip and tc (iproute2) are not installed")
def test_without_root_it_says_so_and_ends_with_77() -> None:
    code = f"import sys; sys.argv = {[TWO_HOSTS[1], '--', 'script.py']!r}\n{NOBODY}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == UNABLE, done.stderr
    assert done.stderr == "two_hosts: cannot build two hosts here: network namespaces need root\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rate", "fast", "--", "x.py"], "'fast' is not a rate"),
        (["--rate", "0mbit", "--", "x.py"], "is not a rate"),
        ([], "no command"),
    ],
)
def test_a_mistake_is_explained(arguments: list[str], said: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert said in re.sub(r"\s+", " ", done.stderr)
