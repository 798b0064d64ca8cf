"""Supervised fine-tuning of vision-language models as a Prefect flow."""

from flows.session.session import training_flow


@training_flow
def vlm_sft() -> None:
    """Fine-tune a vision-language model on conversations."""
