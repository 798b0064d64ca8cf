"""Commands for upkeep: they delete garbage and runs, check plugins, and list what the package holds."""
