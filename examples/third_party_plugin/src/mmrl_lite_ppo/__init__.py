"""Lite-PPO and a penalty for repetition, as plugins for mmrl."""
