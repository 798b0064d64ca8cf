"""DDRL as a Prefect flow."""

from flows.session import training_flow

ddrl = training_flow(
    "ddrl", "DDRL: a policy gradient towards the reward, held near the data by the ordinary diffusion loss on it."
)
