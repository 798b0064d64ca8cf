"""Supervised fine-tuning as a Prefect flow."""

from flows.session import training_flow

sft = training_flow("sft", "Supervised fine-tuning: ranges of flow-matching steps on a media set.")
