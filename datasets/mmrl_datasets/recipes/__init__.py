"""Recipes: the table loader with the options of one public dataset each, and what is known of it."""
