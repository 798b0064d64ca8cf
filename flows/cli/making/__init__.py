"""Commands that make and end runs."""
