"""Vision-language models (VLMs): a file for each family."""
