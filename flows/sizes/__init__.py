"""Sizes of a run, computed before it starts: parameters, bytes, memory."""
