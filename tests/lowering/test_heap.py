"""What a step frees is there for the next step, without the kernel."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
import torch
from autoshard.lowering import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        blocks = [torch.ones(24 << 18) for _ in range(2)]  # 24 MiB each: 6,144 pages
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keep_freed_memory(sys.argv[1])
first = faults()
keep_freed_memory("cpu")
faults()
print(first, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc learns from what is freed")
def test_blocks_that_come_and_go_are_not_taken_from_the_kernel_again() -> None:
    outcome = subprocess.run([sys.executable, "-c", FAULTS, "cuda"], capture_output=True, text=True, timeout=120)
    assert outcome.returncode == 0, outcome.stderr
    before, after = map(int, outcome.stdout.split())
    # all pages at least twice, mapped at first and then of the heap; ten times where nothing lies on the end of that
    assert before > 2 * 2 * 6000 and after < 6000
