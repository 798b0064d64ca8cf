"""Supervised fine-tuning of vision-language models on conversations: data, labels, packing, loss."""
