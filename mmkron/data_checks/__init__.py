"""Checks of a config's data before anything is built, one small function per check."""
