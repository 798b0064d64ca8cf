"""Training of vision-language models (VLMs): settings of stages, conversations in artifacts, trainer."""
