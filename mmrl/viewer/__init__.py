"""Recorded runs as a page: what a browser shows is JSON documents (``pages.py``), served or embedded in one file."""
