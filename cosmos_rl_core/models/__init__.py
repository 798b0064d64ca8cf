"""Pipelines as flow-matching velocity models: one file a pipeline family."""
