"""What a stage makes: one file a stage. Everything passes through ``contracts.py``. Part of cosmos-rl-flows."""
