"""Plugins of each kind, with the imports, fields and names of mmrl 0.2.0."""
