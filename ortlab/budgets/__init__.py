"""Which recompute plans to switch on for a number of bytes: the problem, its solvers, and the record of the answer."""
