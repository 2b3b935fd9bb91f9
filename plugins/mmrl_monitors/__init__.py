"""First-party monitors, one file each; ``within.py`` has what they count within the groups of a step."""
