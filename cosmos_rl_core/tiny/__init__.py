"""Stock pipelines of at most a few million weights, built without downloads, for tests and the demo."""
