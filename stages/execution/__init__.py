"""Processes of stages: the runner, the fork server, the agent of an allocation, and their files."""
