"""Commands for rewards."""
