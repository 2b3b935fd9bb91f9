"""An algorithm and a reward for mmrl."""
