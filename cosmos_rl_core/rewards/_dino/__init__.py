"""Scorers by DINOv2 models."""
