"""The job that a calibration runs in: this process's rank, its device and its process groups."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..errors import CalibrationError
from ..lowering import bind, keep_freed_memory
from ..mesh import Mesh
from .sampling import groups_of

T = TypeVar("T")

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


@dataclass(frozen=True, eq=False)
class Job:
    """One rank of the run.

    Attributes:
        mesh: what is calibrated.
        device_mesh: the same with its process groups.
        rank: from 0; the first one alone prints and writes.
        device: where this rank's tensors are.
        groups: the names of this rank's process groups, by axis, or axes (``dp+tp``).
    """

    mesh: Mesh
    device_mesh: DeviceMesh
    rank: int
    device: torch.device
    groups: Mapping[str, str]

    @classmethod
    def on(cls, mesh: Mesh, device_type: str) -> Job:
        """The job of the default process group, which must exist and have a rank for each of the mesh."""
        keep_freed_memory(device_type)  # as a job that trains does
        device_mesh = init_device_mesh(device_type, mesh.shape, mesh_dim_names=mesh.axes)
        rank = bind(device_mesh, (*mesh.axes, *groups_of(mesh)))
        return cls(mesh, device_mesh, dist.get_rank(), rank.device, rank.groups)

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank, the one that prints and writes files."""
        return self.rank == 0

    def highest(self, *values: float) -> tuple[float, ...]:
        """The largest of each value over all ranks. No rank returns before every rank has called it."""
        agreed = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
        return tuple(agreed.tolist())

    def on_first(self, do: Callable[[], T]) -> T | None:
        """Runs ``do`` on the first rank alone: its result there, None on the others.

        Raises:
            Exception: on the first rank, what ``do`` raised.
            CalibrationError: on the others, that it failed.
        """
        result, failure = None, None
        if self.is_first:
            try:
                result = do()
            except Exception as error:  # every rank must learn of it before it is raised
                failure = error
        failed, *_ = self.highest(float(failure is not None))
        if failure is not None:
            raise failure
        if failed:
            raise CalibrationError("the first rank failed; it says why")
        return result

    def synchronize(self) -> None:
        """Waits for the device of this rank."""
        if self.device.type != "cpu":
            torch.get_device_module(self.device.type).synchronize()


@contextmanager
def start_job(mesh: Mesh, device_type: str, timeout_s: float) -> Iterator[Job]:
    """Joins the process group that torchrun prepared, and leaves it.

    Collectives between host tensors run on gloo whatever the device, so that agreeing costs the device nothing.

    Raises:
        CalibrationError: this is no torchrun job, or one of another size than the mesh, or too few devices.
    """
    check_job(mesh, device_type, os.environ)
    if device_type != "cpu":
        torch.get_device_module(device_type).set_device(int(os.environ["LOCAL_RANK"]))
    backend = "gloo" if device_type == "cpu" else f"cpu:gloo,{device_type}:{BACKENDS[device_type]}"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    try:
        yield Job.on(mesh, device_type)
    finally:
        dist.destroy_process_group()


def check_job(mesh: Mesh, device_type: str, environment: Mapping[str, str]) -> None:
    """Checks, before any rank waits for another, that the job fits the mesh.

    Raises:
        CalibrationError: it does not.
    """
    run = f"torchrun --nproc-per-node {mesh.size} -m autoshard calibrate --mesh {mesh} ..."
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        raise CalibrationError(f"calibration runs on every rank of the mesh; start it with {run}")
    world = int(environment["WORLD_SIZE"])
    if world != mesh.size:
        fault = "fewer ranks than" if world < mesh.size else "more ranks than"
        raise CalibrationError(
            f"the job has {world} rank{'s' * (world > 1)}, {fault} the mesh {mesh}, which needs {mesh.size}; start it "
            f"with {run} (over several hosts: --nnodes too), or calibrate a mesh of {world}"
        )
    if device_type == "cpu":
        return
    found, wanted = torch.get_device_module(device_type).device_count(), int(environment.get("LOCAL_WORLD_SIZE", 1))
    if found < wanted:
        raise CalibrationError(f"{wanted} ranks run on this host, but it has {found} {device_type} devices")
