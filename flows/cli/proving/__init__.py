"""Commands that prove and compare."""
