"""The protocol of reward services, as their clients speak it."""
