"""First-party environments: tools as functions, code, images to look at again, games, servers of tools."""
