"""Readers of other projects' recipes."""
