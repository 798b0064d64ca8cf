"""Settings of the training of vision-language models (VLMs)."""
