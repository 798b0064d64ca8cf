"""Studies: several runs that differ in a few settings, compared on one page."""
