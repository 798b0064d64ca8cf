"""Processes that serve stages without a start of their own: a server that forks them, and processes that stay."""

LEFT = b"left\n"
"""Reply of a process that ends after a successful Request, because the Request left something in the process."""
