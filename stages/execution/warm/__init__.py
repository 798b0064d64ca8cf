"""Processes that serve stages without a start of their own: a server that forks them, and processes that stay."""

LEFT = b"left\n"
"""Reply of a process whose Request ended well and left something in it: it then ends."""
