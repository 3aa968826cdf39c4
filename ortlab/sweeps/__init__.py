"""Sweeps: many configurations of one experiment from one start."""
