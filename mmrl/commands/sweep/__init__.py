"""``mmrl sweep``: one run for each combination of values and each seed."""
