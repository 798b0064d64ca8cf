"""Judges: the questions to them, and how scores are read in their answers."""
