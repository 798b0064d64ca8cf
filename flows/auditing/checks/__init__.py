"""Checks of what files of right bytes say: that it follows from plan, settings and other artifacts."""
