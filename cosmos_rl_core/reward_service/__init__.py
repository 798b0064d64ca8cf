"""A reward service with cosmos-rl's protocol: durable requests, a process per scorer, answers that name scorers."""
