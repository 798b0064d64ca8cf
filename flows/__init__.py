"""Prefect flows and commands, which decide when stages run. Nothing here imports torch. Part of cosmos-rl-flows."""
