"""Blame: which switches, of all that differ, cause a change of numbers, of time, of memory, or a failure."""
