"""Defaults of options, which the command line shows without importing what uses them."""

DEFAULT_STORE = "outputs"
"""Directory of all runs."""
GRACE_H = 24.0
"""Hours for which an attempt may write nothing and still counts as running; no stage is silent for longer."""
