"""Lite-PPO, a penalty for repetition and a calculator, as plugins for mmrl."""
