"""Recipes: the table loader with the options of one public dataset each, and facts of that dataset."""
