"""Solvers of rollouts, one file each: a plugin is found by its name."""
