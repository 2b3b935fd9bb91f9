"""``mmrl doctor``: examines a machine and its numbers, and answers with one table."""
