"""The package's name and version."""

DISTRIBUTION = "mmrl-train"
"""Its name on package indexes and for pip: the ``mmrl`` there is another project."""

__version__ = "0.3.0.dev0"
