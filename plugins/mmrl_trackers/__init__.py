"""First-party experiment trackers, one file each."""
