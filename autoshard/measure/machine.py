"""Facts about the machine that a run measures: its name, cores, memory, hosts and versions of software."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.distributed as dist

from cost_models.samples import Header

from .job import BACKENDS, Job


def header(job: Job) -> Header:
    """What the samples of this run are measured on. All ranks call it."""
    return Header(
        mesh=str(job.mesh),
        hosts=hosts(job),
        device=job.device.type,
        backend=BACKENDS[job.device.type],
        machine=_machine(job.device),
        versions=_versions(job.device),
        created=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        command=shlex.join([os.path.basename(sys.argv[0]), *sys.argv[1:]]),
    )


def hosts(job: Job) -> tuple[int, ...]:
    """The host of every rank: the number of the torchrun that started it."""
    own = [0.0] * job.mesh.size
    own[job.rank] = float(os.environ.get("GROUP_RANK", "0"))
    return tuple(int(host) for host in job.highest(*own))


def memory_bytes(job: Job) -> int:
    """Memory of one device: of a CPU rank its share of the host's."""
    if job.device.type == "cpu":
        return _host_memory_bytes() // _ranks_here()
    return int(torch.get_device_module(job.device.type).get_device_properties(job.device).total_memory)


def free_bytes(job: Job) -> int:
    """The bytes that every rank can still allocate: the least over all ranks."""
    if job.device.type == "cpu":
        own = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // _ranks_here()
    else:
        own = torch.get_device_module(job.device.type).mem_get_info(job.device)[0]
    return int(-job.highest(-float(own))[0])


def _ranks_here() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE") or dist.get_world_size())


def _host_memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _machine(device: torch.device) -> dict[str, str]:
    facts = {
        "cpu": _cpu_name(),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "memory GiB": str(round(_host_memory_bytes() / 2**30)),
        "threads of a rank": str(torch.get_num_threads()),
    }
    if device.type != "cpu":
        facts["device"] = torch.get_device_module(device.type).get_device_name(device)
    return facts


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return (names or [platform.processor() or platform.machine()])[0]


def _versions(device: torch.device) -> dict[str, str]:
    found = {"torch": str(torch.__version__), "python": platform.python_version()}
    if device.type == "cuda":
        found |= {"cuda": str(torch.version.cuda), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    return found
