"""Commands other than training: rerun, export, checks."""
