"""Re-scoring: stored samples of a run under other rewards, beside the run."""
