"""Scorers by vision-language models (VLMs)."""
