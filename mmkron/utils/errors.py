"""The error that the tools show without a traceback."""

from __future__ import annotations


class LaunchError(ValueError):
    """A mistake of the caller that one message explains."""
