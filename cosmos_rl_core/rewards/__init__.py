"""Scores of generated media: one file a reward."""
