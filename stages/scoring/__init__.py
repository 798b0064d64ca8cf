"""Scores of samples, and the rewards and advantages that training makes of them."""
