"""Processes of stages: the runner, what keeps stages warm, and their files."""
