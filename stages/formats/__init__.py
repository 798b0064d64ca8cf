"""What artifacts hold: samples, tensors and tables, written and read back."""
