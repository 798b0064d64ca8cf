"""Servers of HTTP."""
