"""When stages run: Prefect flows. Nothing here imports torch. Part of cosmos-rl-flows."""
