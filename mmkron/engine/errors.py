"""Errors that the tools show without a traceback."""

from __future__ import annotations

from traceback import walk_tb

_READERS = ('_is_lazy_import', '_file2dict', '_parse_lazy_import')  # MMEngine calls one of them for each config file


class LaunchError(ValueError):
    """A mistake of the caller that one message explains."""


def describe_config_error(error: Exception) -> str:
    """Return why MMEngine cannot read a config, with the file and, where it is known, the line.

    The file may be a base of the config, or a module that the config imports.
    """
    file, line, in_config = '', None, False
    for frame, number in walk_tb(error.__traceback__):
        name = frame.f_code.co_filename
        if frame.f_code.co_name in _READERS:
            file, line, in_config = frame.f_locals['filename'], None, True
        elif name == file or not (in_config or name.startswith('<frozen')):
            file, line = name, number
    if isinstance(error, (ImportError, OSError)) and not (line and in_config):  # the message names what is missing
        root = error
        while isinstance(root.__context__, ImportError):
            root = root.__context__
        return str(error) if root is error else f'{root}; {error}'
    if isinstance(error, UnicodeDecodeError):
        line = error.object.count(b'\n', 0, error.start) + 1
    elif isinstance(error, SyntaxError):
        file, line = file if in_config else error.filename, error.lineno
    elif hasattr(error, 'problem_mark'):  # YAML
        line = error.problem_mark.line + 1
    elif hasattr(error, 'colno'):  # JSON
        line = error.lineno
    return f'{file}{f", line {line}" if line else ""}: {type(error).__name__}: {getattr(error, "msg", None) or error}'
