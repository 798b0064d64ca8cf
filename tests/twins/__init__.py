"""Twins of the deployed recipes: the same recipe, profile and commands, on tiny weights of the model's class."""
