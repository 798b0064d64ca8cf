"""Rows of files for vision-language models: supervised fine-tuning on conversations."""
