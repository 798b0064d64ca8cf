"""Process groups, sharded weights, context parallelism and precision."""
