"""Every error autoshard raises on purpose.

    AutoshardError
    ├── MeshError             a mesh that cannot be read, or does not match the job
    ├── LayoutError           a placement text that cannot be read, or does not fit its tensor
    ├── CaptureError          the model cannot be captured as one graph
    ├── StrategyWarning       (a warning) an operator without a rule is replicated
    ├── ConstraintError       a pin that names nothing, or that no plan can satisfy
    ├── InfeasibleError       no assignment satisfies the constraints
    ├── ContradictionError    both: constraints that can hold each, and not together on one tensor or axis
    ├── BudgetError           a memory budget that cannot be read, or that no plan fits
    ├── PlanFileError         a plan file that cannot be read or written
    ├── PlanMismatchError     a good plan, but for another model, shape or mesh
    ├── JobError              ranks that differ, or one that failed or did not come
    ├── CalibrationError      a calibration run that cannot start, or that broke off
    ├── InputError            a parallel module is called with what does not fit its plan
    ├── BackwardError         a backward through a parallel module that would not give the right gradients
    └── VerificationError     the lowered graph does not do what the plan says

The mistakes of a user are ``ValueError`` too, so that callers who know nothing of autoshard catch them.
"""


class AutoshardError(Exception):
    """Base of every error raised on purpose."""


class MeshError(AutoshardError, ValueError):
    """A mesh text that cannot be read, an unknown axis, or a mesh of another size than the job."""


class LayoutError(AutoshardError, ValueError):
    """A layout text that cannot be read, or a layout that does not fit its tensor or mesh."""


class CaptureError(AutoshardError, ValueError):
    """The model cannot be captured as one graph; the message names the source line."""


class ConstraintError(AutoshardError, ValueError):
    """A pin that names nothing in the model, or that the operator or tensor cannot take."""


class InfeasibleError(AutoshardError):
    """No assignment satisfies the constraints."""


class ContradictionError(ConstraintError, InfeasibleError):
    """Constraints that can hold each exclude each other, on one tensor or one axis; the message names them."""


class BudgetError(AutoshardError, ValueError):
    """A memory budget that cannot be read, or one that no plan under the constraints fits."""


class PlanFileError(AutoshardError, ValueError):
    """A plan file that is truncated, malformed, too large, or cannot be written."""


class PlanMismatchError(AutoshardError, ValueError):
    """The plan was made for another model, other shapes or another mesh; the message says which part differs."""


class JobError(AutoshardError):
    """The ranks of a job differ (in plan, code, torch or model), or one of them failed or did not come; says which."""


class CalibrationError(AutoshardError):
    """A calibration run that does not fit its job, or that broke off; the samples it took are kept."""


class InputError(AutoshardError, ValueError):
    """A parallel module is called with tensors of other shapes than its plan declares, in another mode, or under other
    settings of torch than it was captured under.
    """


class BackwardError(AutoshardError, RuntimeError):
    """A backward through a parallel module cannot give the right gradients: for the second time, twice differentiated,
    or after a tensor that it needs was changed in place. Where torch itself refuses, it raises a RuntimeError, too.
    """


class VerificationError(AutoshardError):
    """The collectives of the lowered graph are not the collectives of the plan."""


class StrategyWarning(UserWarning):
    """An operator has no verified sharding rule and runs replicated."""
