"""``mmrl check``: what a config would do, found out without a GPU."""
