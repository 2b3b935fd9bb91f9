"""``mmrl plan``: estimates a run's memory and time before it is launched."""
