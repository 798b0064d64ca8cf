"""The contents of a directory of a diffusers pipeline: its classes, sizes, memory, files."""
