"""FlowGRPO as a Prefect flow."""

from flows.session.session import training_flow


@training_flow
def grpo() -> None:
    """Train by FlowGRPO: a policy gradient towards the reward, kept near a reference policy."""
