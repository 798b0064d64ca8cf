"""The look of a run in Prefect: artifacts while it works, the tasks of killed tries, errors in the log."""
