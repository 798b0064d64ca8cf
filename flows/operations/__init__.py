"""Commands beside training: rerun, garbage collection, export, checks."""
