"""What this is called, and which version."""

DISTRIBUTION = "mmrl-train"
"""What package indexes and pip call it: the ``mmrl`` there is another project."""

__version__ = "0.2.0"
