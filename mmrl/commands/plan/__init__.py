"""``mmrl plan``: what a run will take in memory and time, before it is launched."""
