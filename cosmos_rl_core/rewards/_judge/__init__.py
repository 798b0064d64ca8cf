"""Judges: what they are asked, and what their answers say."""
