"""Models: their families and folders, what is computed with them, and their weights."""
