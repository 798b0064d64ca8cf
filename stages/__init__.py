"""What a stage makes: one file a stage. Everything passes through the contracts in ``contracts.py``."""
