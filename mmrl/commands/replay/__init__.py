"""Takes a finished step again, from a run's record, without a device or a model."""
