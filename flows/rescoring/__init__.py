"""Re-scoring: stored samples of a run under other rewards, in a folder of the run."""
