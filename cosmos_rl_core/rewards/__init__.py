"""Rewards: scores of generated media, one file per reward."""
