"""Names that plugins import and implement, and that later versions keep: a module for each kind of plugin."""
