"""Heads of a run, and signatures of them."""
