"""What the tools tell a user without a traceback."""

from __future__ import annotations

from traceback import walk_tb

_READERS = ('_is_lazy_import', '_file2dict', '_parse_lazy_import')  # MMEngine calls one of them per config file


class LaunchError(ValueError):
    """A mistake of the caller that one message explains; the command line shows it without a traceback."""


def describe_config_error(error: Exception) -> str:
    """Return the reason why MMEngine cannot read a config, after the file and the line in which it arose.

    The file may be one of the config's bases, or a module that the config imports.
    """
    file, line, config = '', None, False
    for frame, number in walk_tb(error.__traceback__):
        name = frame.f_code.co_filename
        if frame.f_code.co_name in _READERS:
            file, line, config = frame.f_locals['filename'], None, True
        elif name == file or not (config or name.startswith('<frozen')):
            file, line = name, number
    if isinstance(error, (ImportError, OSError)) and (line is None or not config):  # these name what they lack
        root = error
        while isinstance(root.__cause__ or root.__context__, ImportError):
            root = root.__cause__ or root.__context__
        return str(error) if root is error else f'{root}; {error}'
    if isinstance(error, UnicodeDecodeError):
        line = error.object.count(b'\n', 0, error.start) + 1
    elif isinstance(error, SyntaxError) and error.lineno:
        file, line = file if config else error.filename, error.lineno
    elif hasattr(error, 'problem_mark'):  # of YAML
        line = error.problem_mark.line + 1
    line = getattr(error, 'lineno', None) or line  # of JSON
    if config and not file.endswith('.py') and isinstance(error, (AttributeError, TypeError)):
        return f'{file}: it must hold a mapping of keys to values'
    reason = getattr(error, 'problem', None) or getattr(error, 'msg', None) or error
    return f'{file}{f", line {line}" if line else ""}: {type(error).__name__}: {reason}'
