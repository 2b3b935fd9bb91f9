"""``mmrl doctor``: what a machine can carry, and whether its numbers are right, as one table."""
