"""Pipelines as flow-matching velocity models, one folder for each pipeline family."""
