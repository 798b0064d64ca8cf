"""Captioner plugins: what writes captions of media that have none."""
