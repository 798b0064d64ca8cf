"""The suite that every plugin passes, shipped or of somebody else's. It needs pytest."""
