"""What a directory of a diffusers pipeline holds: its classes, sizes, memory, files."""
