"""Plans of runs and of data in words."""
