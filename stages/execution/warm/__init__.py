"""Processes that serve stages without a start of their own: a server that forks them, and processes that stay."""
