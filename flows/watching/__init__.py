"""Look at runs: status, metrics, trackers."""
