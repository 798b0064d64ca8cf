"""Commands that keep the house."""
