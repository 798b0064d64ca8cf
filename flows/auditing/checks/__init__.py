"""Checks of the contents of files whose bytes are right: they follow from plan, settings and other artifacts."""
