"""Weights of policies: parts, adapters, base weights, exports."""
