"""The learner: packed rows, DeepSpeed, its settings and its state."""
