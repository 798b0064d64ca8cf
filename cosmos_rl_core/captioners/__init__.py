"""Captioner plugins, which write captions for media without one."""
