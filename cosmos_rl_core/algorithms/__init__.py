"""Losses and advantages, one file for each algorithm. No file here imports torch at run time."""
