"""Supervised fine-tuning as a Prefect flow."""

from flows.session.session import training_flow


@training_flow
def sft() -> None:
    """Fine-tune on a media set by flow matching."""
