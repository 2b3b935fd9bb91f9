"""First-party rewards, one file each."""
