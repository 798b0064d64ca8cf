"""Weights of policies."""
