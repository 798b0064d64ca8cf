"""Noise schedules, solver steps and the one rollout loop."""
