"""Work of commands other than training: rerun, datasets, checks, set-up of a Prefect server."""
