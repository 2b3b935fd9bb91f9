"""First-party dataset loaders and generators."""
