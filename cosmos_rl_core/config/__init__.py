"""Closed configuration: what a recipe may say, and what each setting does."""
