"""Commands that take over recipes, weights and embeddings from elsewhere."""
