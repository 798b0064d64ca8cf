"""Losses and advantages: one file an algorithm. No file here imports torch at run time."""
