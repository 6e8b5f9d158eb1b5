"""Launching: what ``tools/train.py`` and ``tools/test.py`` call. Imports no host library."""
