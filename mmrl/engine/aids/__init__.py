"""Works on the engine: exports, tiny models, the error of an attention kernel."""
