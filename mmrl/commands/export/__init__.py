"""``mmrl export``: a checkpoint, or any model folder, as a folder of its own."""
