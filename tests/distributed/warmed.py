"""What ranks need and no test is about, done once in the server that they are forked from: imports, what the first
capture of a process takes longer than the next, and a heap that the garbage collector need not look through.
"""

import gc

import torch.distributed.tensor  # noqa: F401

import autoshard.api  # noqa: F401
from autoshard.capture import capture

from . import cases

capture(*cases.make("llama small"), guarded=True)
gc.collect()
gc.freeze()
