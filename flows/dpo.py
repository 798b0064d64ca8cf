"""Flow-DPO as a Prefect flow."""

from flows.session.session import training_flow


@training_flow
def dpo() -> None:
    """Train by Flow-DPO: of two samples of a prompt, the better one becomes likelier than the worse one."""
