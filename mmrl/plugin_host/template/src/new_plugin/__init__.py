"""An algorithm, a reward and an environment for mmrl."""
