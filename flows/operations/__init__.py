"""Commands beside training: rerun, export, checks."""
