"""What the C library does with the memory that a step frees, on a CPU.

glibc takes a block of 128 KiB or more from the kernel and gives it back when it is freed; every page of the next one is
then a fault, and filled with zeros first. It learns: once such a block was freed, blocks of up to its size come from
the heap, whose end goes back to the kernel only where twice that size is free. A step that gathers 18 MiB of parameters
and reduces their gradients had 11,400 faults on each of 4 ranks, and took 1.05 times as long as it does with what a
block of the largest size teaches (benchmarks/step.py's mixture of experts with its experts cut over all ranks).

Source: mallopt(3), M_MMAP_THRESHOLD and M_TRIM_THRESHOLD.
"""

from __future__ import annotations

import torch

LARGEST_BYTES = (32 << 20) - (8 << 10)
"""Of a block that glibc learns from: 32 MiB on 64 bits, with what it writes before the block and what aligns it."""


def keep_freed_memory(device_type: str) -> None:
    """From here on, glibc keeps up to 64 MiB of what this process frees at the end of its heap. Nothing happens on
    other devices or with other C libraries, or where the environment sets glibc's thresholds (``MALLOC_...``).
    """
    if device_type == "cpu":
        torch.empty(LARGEST_BYTES, dtype=torch.uint8)  # none of its pages is touched
