"""What a step frees is there for the next step, without the kernel."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

FAULTS = """
import ctypes, resource, sys
from autoshard.lowering import keep_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.memset.argtypes, libc.free.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t], [ctypes.c_void_p]
SIZE = 18 << 20  # 4,608 pages

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        blocks = [libc.malloc(SIZE) for _ in range(3)]  # more than glibc keeps of such: twice the largest it has seen
        for block in blocks:
            libc.memset(block, 1, SIZE)
        for block in blocks:  # the last one last: nothing lies behind it
            libc.free(block)
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
    assert before > 10 * 3 * 4500 and after < 4500
