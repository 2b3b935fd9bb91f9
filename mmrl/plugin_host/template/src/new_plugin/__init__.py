"""An algorithm, a reward, an environment and a monitor for mmrl."""
