"""Sizes of a run before it runs: parameters, bytes, memory."""
