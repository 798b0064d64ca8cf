"""Runs that fine-tune a vision-language model (VLM): their plan, Requests and list of waves."""
