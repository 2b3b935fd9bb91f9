"""Pure functions on numbers: credit, surrogate losses, KL, aggregation, packing, log-probs."""
