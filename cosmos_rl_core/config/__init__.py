"""Configuration models: the settings of a recipe, and what each does."""
