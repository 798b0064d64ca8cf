"""How ranks share the work: process groups, sharded weights, shared tokens, precision."""
