"""One step after another: sample, credit, update."""
