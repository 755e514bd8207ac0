"""Times collectives and kernels on the real devices of a job: the samples that a hardware profile is fitted to."""

from .calibrate import Calibration, calibrate
from .job import Job, start_job
from .measure import Progress
from .output import check_writable
from .profile_check import Series, check
from .sampling import QUICK, THOROUGH, Effort

__all__ = [
    "QUICK",
    "THOROUGH",
    "Calibration",
    "Effort",
    "Job",
    "Progress",
    "Series",
    "calibrate",
    "check",
    "check_writable",
    "start_job",
]
