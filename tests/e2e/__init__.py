"""Whole runs: killed, deployed, watched, on servers of their own."""
