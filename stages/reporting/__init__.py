"""How the report looks."""
