"""Work on runs beside training: rerun, garbage collection, export, checks."""
