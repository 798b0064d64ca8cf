"""Forks: runs that begin in the middle of another run, with its artifacts by reference."""
