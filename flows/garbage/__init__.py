"""Files of a store that nothing reads, and their end."""
