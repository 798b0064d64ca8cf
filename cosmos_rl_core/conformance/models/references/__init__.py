"""Prompts with references, of every model plugin that takes them."""
