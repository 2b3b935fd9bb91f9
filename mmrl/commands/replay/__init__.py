"""A finished step once more, from what the run recorded of it: without a device, without a model."""
