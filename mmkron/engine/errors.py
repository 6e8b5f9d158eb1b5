"""What the tools tell a user without a traceback."""


class LaunchError(ValueError):
    """A mistake of the caller that one message explains; the command line shows it without a traceback."""
