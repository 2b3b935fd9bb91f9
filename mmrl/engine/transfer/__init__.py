"""Weights on their way from the ranks that learn to the ranks that sample."""
