"""Prompts in, scored groups out."""
