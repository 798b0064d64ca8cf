"""Stock pipelines of a few million weights at most, built without downloads: for tests and for the demo's model."""
