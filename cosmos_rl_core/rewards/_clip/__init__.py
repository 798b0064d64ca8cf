"""Scorers by CLIP models."""
