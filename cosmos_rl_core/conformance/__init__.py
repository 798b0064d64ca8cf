"""The suite that every plugin has to pass, shipped or from outside. It needs pytest."""
