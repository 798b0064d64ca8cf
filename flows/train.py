"""A training flow for every algorithm, also for plugins from outside: deployments of those name it."""

from flows.running.session import any_training_flow


@any_training_flow
def train() -> None:
    """Post-training by the algorithm that the recipe names."""
