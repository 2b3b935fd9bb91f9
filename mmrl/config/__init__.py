"""A run's config: its sections, and how files and overrides become one."""
