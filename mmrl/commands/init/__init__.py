"""``mmrl init``: the first files of a new project."""
