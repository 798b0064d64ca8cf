"""Processes of stages: the runner, what keeps stages warm, the agent of an allocation, and their files."""
