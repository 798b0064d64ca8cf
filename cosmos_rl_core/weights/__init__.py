"""Weights of policies: parts, adapters, bases, exports."""
