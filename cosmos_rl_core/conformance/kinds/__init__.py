"""The suite of every kind of plugin: a file of checks for each kind, and one for all kinds."""
