"""Means, the standard errors of means, and how both are written."""
