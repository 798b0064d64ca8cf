"""DDRL as a Prefect flow."""

from flows.running.session import training_flow


@training_flow
def ddrl() -> None:
    """DDRL: a policy gradient towards the reward, held near the data by the ordinary diffusion loss on it."""
