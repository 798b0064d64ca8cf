"""How a stage runs: the runner, the fork server, the agent of an allocation, the outcome."""
