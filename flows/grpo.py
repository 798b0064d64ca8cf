"""FlowGRPO as a Prefect flow."""

from flows.running.session import training_flow


@training_flow
def grpo() -> None:
    """FlowGRPO: a policy gradient towards the reward, held near a reference policy."""
