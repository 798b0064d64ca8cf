"""Rows of files of vision-language models: supervised fine-tuning on conversations."""
