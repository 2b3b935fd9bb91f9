"""``mmrl help``: a search in the pages, the config's keys, the commands and the exit codes that are installed."""
