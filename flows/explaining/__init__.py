"""Explanations of plans: what a run would do, in words and as JSON."""
