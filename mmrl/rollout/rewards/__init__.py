"""Rewards in worker processes that can be killed: one may raise, hang or crash without taking the run along."""
