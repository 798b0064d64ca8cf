"""FlowGRPO as a Prefect flow."""

from flows.session import training_flow

grpo = training_flow("grpo", "FlowGRPO: a policy gradient towards the reward, held near a reference policy.")
