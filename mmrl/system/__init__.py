"""Machine and process: console, signals, child processes, redaction, clocks."""
