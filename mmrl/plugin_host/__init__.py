"""Finds, checks and makes plugins."""
