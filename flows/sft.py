"""Supervised fine-tuning as a Prefect flow."""

from flows.running.session import training_flow


@training_flow
def sft() -> None:
    """Supervised fine-tuning: ranges of flow-matching steps on a media set."""
