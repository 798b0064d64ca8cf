"""Artifacts of a run in Prefect: a table of iterations, progress, pictures, the address of the report."""
