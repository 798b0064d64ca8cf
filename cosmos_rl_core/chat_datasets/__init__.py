"""Datasets of conversations: a file for each format."""
