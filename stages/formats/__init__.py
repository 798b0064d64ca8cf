"""The contents of artifacts: samples, tensors and tables, written and read back."""
