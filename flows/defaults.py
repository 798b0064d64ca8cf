"""Defaults of options, which the command line shows without importing what uses them."""

DEFAULT_STORE = "outputs"
"""Directory of all runs."""
GRACE_H = 24.0
"""Hours without a write after which an attempt counts as ended. Longer than any stage computes without writing."""
SNAPSHOTS_KEPT = 3
"""Newest snapshots of a dataset that are kept, with all that they name."""
