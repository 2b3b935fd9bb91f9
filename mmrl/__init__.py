"""Reinforcement-learning post-training of vision-language models and text LLMs, with plugin algorithms."""

DISTRIBUTION = "mmrl-train"
"""What package indexes and pip call it: the ``mmrl`` there is another project."""

__version__ = "0.2.0"
