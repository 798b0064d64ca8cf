"""The stages, one file each. Everything passes through ``contracts.py``. Part of cosmos-rl-flows."""
