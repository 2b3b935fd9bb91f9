"""Functions: train, evaluate, export."""
