"""A run at work: the loop, and what watches it."""
