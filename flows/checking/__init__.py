"""Checks of a recipe before anything runs."""
