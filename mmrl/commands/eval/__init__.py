"""`mmrl eval`: evaluates a model, and keeps completions and results."""
