"""Texts of profile files that the tests read and break."""

from __future__ import annotations

GOOD = """\
version: 1
name: two-boxes
provenance: measured by hand
devices_per_host: 4
memory_bytes: 24e9
compute:
  launch_s: 5e-6
  memory_bandwidth_bytes_per_s: 1e12
  peak_flops_per_s: {float32: 40e12, bfloat16: 80e12}
  compute_efficiency: {default: 0.2, matmul: 0.7}
  memory_efficiency: {default: 0.8}
links:
  intra_host: {name: PCIe 4, launch_s: 10e-6, latency_s: 2e-6, bandwidth_bytes_per_s: 20e9}
  inter_host: {name: Ethernet, launch_s: 20e-6, latency_s: 20e-6, bandwidth_bytes_per_s: 3e9}
"""


MEASURED = """\
version: 2
name: two-hosts
provenance:
  sources: measured by a test
  machine: 2 cores
  versions: {torch: 2.13.0}
  date: 2026-11-20
  command: torchrun --nproc-per-node 4
  residuals:
    collectives: {dp: {all_gather: {median: 0.1, largest: 0.3, points: 12}}}
    kernels: {matmul/bfloat16: {median: 0.05, largest: 0.2, points: 7}}
memory_bytes: 6e9
compute:
  launch_s: 2e-6
  memory_bandwidth_bytes_per_s: 40e9
  peak_flops_per_s: {float32: 60e9, bfloat16: 200e9}
  compute_efficiency: {default: 0.5, matmul: [[1e6, 0.25], [1e9, 0.8]], matmul/bfloat16: 0.9}
  memory_efficiency: {default: 0.5, copy: [[1e5, 1.0], [1e6, 0.5]]}
axes:
  dp:
    size: 2
    name: slow
    launch_s: 1e-3
    latency_s: 0
    bandwidth_bytes_per_s: 25e6
    launches_s: {all_gather: 5e-4}
    curves: {all_gather: [[1024, 1e-4], [65536, 1e-3], [1e6, 4e-2]]}
  tp: {size: 2, name: fast, launch_s: 3e-4, latency_s: 0, bandwidth_bytes_per_s: 800e6}
  dp+tp: {size: 4, name: both, launch_s: 3e-3, latency_s: 0, bandwidth_bytes_per_s: 20e6}
"""

TORUS = GOOD.replace(
    "devices_per_host: 4\n", "devices_per_host: 16\ntorus: {shape: [4, 4], slices: [[2, 2]]}\n"
).replace("version: 1", "version: 2")

BASED = """\
version: 2
name: our-h100s
based_on: dgx-h100
provenance: as dgx-h100, four GPUs a host and 200 Gb/s RoCE, measured with nccl-tests
devices_per_host: 4
links: {inter_host: {name: RoCE, bandwidth_bytes_per_s: 25e9, efficiency: {all_to_all: 0.5}}}
"""
