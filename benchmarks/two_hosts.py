"""Two hosts on one machine: runs a command on 2 x 2 ranks with a shaped link between the pairs.

    python benchmarks/two_hosts.py --rate 200mbit -- -m autoshard calibrate --mesh dp=2,tp=2 -o profile.yaml
    python benchmarks/two_hosts.py --rate 1gbit -- script.py args

What follows ``--`` goes to torchrun, once per host. A host is a network namespace; a veth pair joins the two, and a
token bucket (``tc tbf``) shapes what each of them sends. Ranks 0 and 1 are on the first host, 2 and 3 on the second, so
of a mesh dp=2,tp=2 the axis dp crosses the link and tp does not. Needs Linux, root, and iproute2 (``ip`` and ``tc``).

Before the command starts, plain sockets show what the link really carries; the command finds it in its environment:
``TWO_HOSTS_RATE_BYTES_PER_S`` (shaped) and ``TWO_HOSTS_RAW_BYTES_PER_S`` (reached in each direction, both ways busy).

Every run has namespaces of its own, and takes them down with all processes in them when it ends: after a failure and
after SIGINT, SIGTERM or SIGHUP too. What a run left that was killed outright is taken down by the next one.

Exit codes: that of the command; 77 this machine cannot build the hosts (the reason is on stderr); 124 the command ran
past its time; 128 + n ended by signal n; 2 a mistake in the arguments.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

EXIT_UNABLE = 77  # automake's code for a test that could not be run
EXIT_OVERDUE = 124  # that of coreutils' timeout
PORT = 29511  # each run has its own network, so nothing else listens there
PREFIX = "autoshard"
GRACE_S = 10.0
CHUNK_BYTES = 1 << 18
# one thread for each of the ranks that share the cores; and torch warns that addresses here have no names
_QUIET = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
_UNITS = {"kbit": 125, "mbit": 125_000, "gbit": 125_000_000}


class UnableError(Exception):
    """This machine cannot build the hosts, and why."""


class SignalError(BaseException):
    """A signal asked this program to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@dataclass(frozen=True)
class Host:
    """A network namespace, its end of the link and its address there."""

    namespace: str
    interface: str
    address: str

    def inside(self, *command: str) -> list[str]:
        """The command line that runs a command on this host."""
        return ["ip", "netns", "exec", self.namespace, *command]


@contextmanager
def two_hosts(rate: str, burst_bytes: int) -> Iterator[tuple[Host, Host]]:
    """Builds the hosts and takes them down, whatever happens between.

    Raises:
        UnableError: no root, no ``ip`` or ``tc``, or a kernel without namespaces, veth or tbf.
    """
    check_able()
    remove_leftovers()
    run = f"{PREFIX}-{os.getpid()}-{secrets.token_hex(2)}"
    hosts = Host(f"{run}-0", "v0", "10.77.0.1"), Host(f"{run}-1", "v1", "10.77.0.2")
    try:
        _build(hosts, rate, burst_bytes)
        yield hosts
    finally:
        with _signals_ignored():
            for host in hosts:
                remove(host.namespace)


def check_able() -> None:
    """Raises UnableError where root or a tool is missing."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise UnableError(f"{' and '.join(missing)} not found; install iproute2")
    if os.geteuid() != 0:
        raise UnableError("network namespaces need root")


def _build(hosts: tuple[Host, Host], rate: str, burst_bytes: int) -> None:
    first, second = hosts
    for host in hosts:
        _system("ip", "netns", "add", host.namespace)
    ends = (first.interface, "netns", first.namespace), (second.interface, "netns", second.namespace)
    _system("ip", "link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1])
    for host in hosts:
        _system("ip", "-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", host.interface)
        for interface in (host.interface, "lo"):
            _system("ip", "-n", host.namespace, "link", "set", interface, "up")
        shape = ("tbf", "rate", rate, "burst", str(burst_bytes), "latency", "50ms")
        _system("tc", "-n", host.namespace, "qdisc", "add", "dev", host.interface, "root", *shape)


def _system(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UnableError(f"{' '.join(command)}: {done.stderr.strip() or f'exit status {done.returncode}'}")


def remove(namespace: str) -> None:
    """Ends every process in a namespace and deletes it, its interfaces too. Does nothing where it is gone."""
    for number, grace_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
        deadline = time.monotonic() + grace_s
        running = _processes(namespace)
        for process in running:
            with suppress(ProcessLookupError):
                os.kill(process, number)
        while running and time.monotonic() < deadline:
            time.sleep(0.1)
            running = _processes(namespace)
    subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)


def _processes(namespace: str) -> list[int]:
    done = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
    return [int(word) for word in done.stdout.split() if not _has_ended(int(word))]


def _has_ended(process: int) -> bool:
    """Whether a process is gone, or a zombie that its parent has not collected yet."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (OSError, IndexError):
        return True


def remove_leftovers() -> None:
    """Takes down the hosts of runs whose process is gone: they were killed outright."""
    done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        found = re.fullmatch(rf"({PREFIX}-(\d+)-[0-9a-f]{{4}}-[01])\b.*", line)
        if found and not Path(f"/proc/{found[2]}").exists():
            remove(found[1])


def raw_rates(hosts: tuple[Host, Host], seconds: float) -> tuple[float, float]:
    """Bytes per second that plain sockets carry: one way alone, and in each direction with both ways busy."""
    alone = _transfer([hosts], seconds)
    both = _transfer([hosts, hosts[::-1]], seconds)
    return alone[0], min(both)


def _transfer(pairs: Sequence[tuple[Host, Host]], seconds: float) -> list[float]:
    """Bytes per second of each (sender, receiver), all at once."""
    this = (sys.executable, __file__)
    receivers, senders = [], []
    try:
        for _, receiver in pairs:
            command = receiver.inside(*this, "--receive", receiver.address)
            receivers.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        for (sender, receiver), process in zip(pairs, receivers):
            assert process.stdout is not None
            process.stdout.readline()  # it listens
            senders.append(subprocess.Popen(sender.inside(*this, "--send", receiver.address, str(seconds))))
        return [float(process.communicate(timeout=seconds + GRACE_S)[0]) for process in receivers]
    finally:
        for process in (*receivers, *senders):
            process.kill()
            process.wait()


def _send(address: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    with socket.create_connection((address, PORT), timeout=GRACE_S) as connection:
        while time.monotonic() < deadline:
            connection.sendall(bytes(CHUNK_BYTES))


def _receive(address: str) -> None:
    """Prints the rate of what arrives, the first tenth of a second (the bucket starts full) apart."""
    with socket.create_server((address, PORT)) as server:
        print("listening", flush=True)
        connection, _ = server.accept()
        with connection:
            settled = time.monotonic() + 0.1
            first = last = count = 0.0
            while chunk := connection.recv(CHUNK_BYTES):
                last = time.monotonic()
                if last >= settled:
                    first, count = (last, 0.0) if not first else (first, count + len(chunk))
    print(count / (last - first) if last > first else 0.0)


def launch(hosts: tuple[Host, Host], command: Sequence[str], ranks_per_host: int, limit_s: float) -> int:
    """Runs a command under torchrun on both hosts; its exit status, which is not 0 if it failed on either.

    When it fails on one host, the other gets ten seconds to end by itself.
    """
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(ranks_per_host))
    meet = ("--master-addr", hosts[0].address, "--master-port", str(PORT))
    running = []
    for rank, host in enumerate(hosts):
        environment = _QUIET | os.environ | {"GLOO_SOCKET_IFNAME": host.interface}
        line = host.inside(*torchrun, *meet, "--node-rank", str(rank), *command)
        # a session of its own: a Ctrl-C reaches this program alone, which then ends the others
        running.append(subprocess.Popen(line, env=environment, stdin=subprocess.DEVNULL, start_new_session=True))
    deadline = time.monotonic() + limit_s
    statuses = [process.poll() for process in running]
    while None in statuses:
        if any(statuses):  # one host has failed
            deadline = min(deadline, time.monotonic() + GRACE_S)
        if time.monotonic() > deadline:
            return next((_code(status) for status in statuses if status), EXIT_OVERDUE)
        time.sleep(0.05)
        statuses = [process.poll() for process in running]
    return next((_code(status) for status in statuses if status), 0)


def _code(status: int) -> int:
    return status if status > 0 else 128 - status


@contextmanager
def _signals_ignored() -> Iterator[None]:
    """Taking down is not interrupted."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise SignalError(number)


def bytes_per_s(rate: str) -> float:
    """``200mbit`` as bytes per second.

    Raises:
        argparse.ArgumentTypeError: it is not a number and kbit, mbit or gbit.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]bit)", rate)
    if not found or not float(found[1]):
        raise argparse.ArgumentTypeError(f"{rate!r} is not a rate; write for example 200mbit or 1gbit")
    return float(found[1]) * _UNITS[found[2]]


def _rate(text: str) -> str:
    bytes_per_s(text)
    return text


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=_rate, default="200mbit", help="of the link, each way (default: %(default)s)")
    parser.add_argument("--burst", type=int, default=1 << 16, metavar="BYTES", help="the token bucket's size")
    parser.add_argument("--ranks-per-host", type=int, default=2, metavar="N")
    parser.add_argument("--time-limit", type=float, default=900.0, metavar="SECONDS", help="for the command")
    parser.add_argument("--raw-seconds", type=float, default=1.5, metavar="SECONDS", help="of raw transfer; 0: none")
    parser.add_argument("--receive", metavar="ADDRESS", help=argparse.SUPPRESS)
    parser.add_argument("--send", nargs=2, metavar=("ADDRESS", "SECONDS"), help=argparse.SUPPRESS)
    parser.add_argument("command", nargs="*", help="for torchrun, after --")
    arguments = parser.parse_args()
    if not (arguments.command or arguments.receive or arguments.send):
        parser.error("no command; write it after --, for example: -- script.py")
    return arguments


def _say(text: str) -> None:
    print(f"two_hosts: {text}", file=sys.stderr, flush=True)


def run(arguments: argparse.Namespace) -> int:
    """Builds the hosts, measures the link, runs the command; its exit status."""
    shaped = bytes_per_s(arguments.rate)
    with two_hosts(arguments.rate, arguments.burst) as hosts:
        os.environ["TWO_HOSTS_RATE_BYTES_PER_S"] = str(shaped)
        if arguments.raw_seconds > 0:
            alone, both = raw_rates(hosts, arguments.raw_seconds)
            os.environ["TWO_HOSTS_RAW_BYTES_PER_S"] = str(both)
            reached = f"{alone / 1e6:.1f} MB/s one way, {both / 1e6:.1f} MB/s each way with both ways busy"
            _say(f"the link is shaped to {shaped / 1e6:.1f} MB/s; plain sockets reach {reached}")
        return launch(hosts, arguments.command, arguments.ranks_per_host, arguments.time_limit)


def main() -> int:
    """Reads the arguments, runs, explains."""
    arguments = _arguments()
    if arguments.receive:
        _receive(arguments.receive)
        return 0
    if arguments.send:
        _send(arguments.send[0], float(arguments.send[1]))
        return 0
    for number in _ENDING:
        signal.signal(number, _end)
    try:
        return run(arguments)
    except UnableError as reason:
        _say(f"cannot build two hosts here: {reason}")
        return EXIT_UNABLE
    except SignalError as error:
        _say(f"ended by {signal.Signals(error.number).name}; the hosts are taken down")
        return 128 + error.number


if __name__ == "__main__":
    sys.exit(main())
