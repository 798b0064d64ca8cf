"""Files of a store that nothing reads, and their deletion."""
