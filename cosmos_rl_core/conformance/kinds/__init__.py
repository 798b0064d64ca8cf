"""The suite of every kind of plugin: a file for each, and one for what all of them have."""
