"""Scores of samples, and what training makes of them."""
