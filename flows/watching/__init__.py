"""Status, metrics and trackers of runs."""
