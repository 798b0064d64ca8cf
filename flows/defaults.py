"""Defaults of options. They are here so that the command line can show them without importing what uses them."""

DEFAULT_STORE = "outputs"
"""Directory of all runs."""
GRACE_H = 24.0
"""How long an attempt may write nothing and still count as at work. Longer than what any stage computes in silence."""
