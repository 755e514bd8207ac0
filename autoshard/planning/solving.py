"""The solver, as a search asks it that solves several programs: Ctrl-C ends the search, not one of its solves.

Who wants what is best after some time gives a time limit, which all solves of a search share.
"""

from __future__ import annotations

from functools import partial

import solver

solve = partial(solver.solve, answers_interrupt=False)
"""As :func:`solver.solve`; KeyboardInterrupt is raised."""
