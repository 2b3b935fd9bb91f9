"""Reinforcement-learning post-training of vision-language models and text LLMs, with plugin algorithms."""

__version__ = "0.2.0"
