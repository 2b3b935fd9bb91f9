"""The machine under an engine: its memory, tools, drivers and network, and their errors."""
