"""Real pipelines of a few million random weights at most, built without downloads: for tests, and as the start of the demo's model."""
