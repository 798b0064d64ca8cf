"""Checks of plugins outside this package: the suite, and runs of models."""
