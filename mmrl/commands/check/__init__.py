"""``mmrl check``: examines a config without a GPU."""
