"""``mmrl rewards``: a reward on its own, without a model."""
