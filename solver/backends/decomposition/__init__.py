"""Lower bounds and answers for problems that are too large for branch and cut."""
