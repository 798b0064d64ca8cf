"""Reader of cosmos-rl's recipes, of both its schemas."""
