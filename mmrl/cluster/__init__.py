"""The places where ranks run, and calls to them."""
