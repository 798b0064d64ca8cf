"""Names that plugins import and implement, and that stay: a module for each kind."""
