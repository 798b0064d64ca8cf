"""Slots, artifacts and attempts: what a stage is asked to make, the files that it writes, and when they are current."""
