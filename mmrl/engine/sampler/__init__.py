"""The samplers, and the steps that they count."""
