"""A run at work: the loop, and its observers."""
