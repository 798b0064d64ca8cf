"""The console of all commands, and commands that messages print."""
