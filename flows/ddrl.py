"""DDRL as a Prefect flow."""

from flows.session.session import training_flow


@training_flow
def ddrl() -> None:
    """Train by DDRL: a policy gradient towards the reward, kept near the data by the diffusion loss."""
