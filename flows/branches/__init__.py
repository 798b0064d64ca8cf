"""Prefect flows that use the artifacts of a run again, and studies of several runs."""
