"""Noise schedules, sampler kernels and the one rollout loop."""
