"""``mmrl rewards``: tries a reward without a model."""
