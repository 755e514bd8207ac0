"""How a tensor gets from one layout to another, step by step. What is exported here needs neither torch nor numpy.

:mod:`autoshard.redistribution.paths` finds the cheapest way between any two layouts, and needs numpy;
:mod:`autoshard.redistribution.execution` runs the steps on tensors, and needs torch. Both are imported by name.
"""

from .steps import Banned, Step, StepKind, size_bytes, step_between, step_on, steps_along

__all__ = ["Banned", "Step", "StepKind", "size_bytes", "step_between", "step_on", "steps_along"]
