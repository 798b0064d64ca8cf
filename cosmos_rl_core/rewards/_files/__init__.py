"""Scores of files, and labels of people."""
