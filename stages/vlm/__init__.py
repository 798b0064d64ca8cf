"""Training of vision-language models (VLMs): the stages and their settings, conversations in artifacts, the trainer."""
