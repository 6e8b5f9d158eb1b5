"""Code blocks of Markdown pages and their markers, ``<!-- KEY: VALUE -->`` on the line above a fence."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import NamedTuple

_BLOCK = re.compile(r'(?:^[ ]*<!-- ([\w ]+): ([^\n]*) -->\n)?^([ ]*)```(\w*)\n(.*?)^\3```$', re.M | re.S)


class Block(NamedTuple):
    """A code block with its first line in the page and its marker, which is ``('', '')`` if there is none."""

    language: str
    text: str
    line: int
    key: str
    value: str


def read_blocks(page: Path, language: str) -> list[Block]:
    """Return the code blocks of a page in a language."""
    text = page.read_text(encoding='utf-8')
    return [
        Block(
            match[4], textwrap.dedent(match[5]), text.count('\n', 0, match.start(5)) + 1, match[1] or '', match[2] or ''
        )
        for match in _BLOCK.finditer(text)
        if match[4] == language
    ]
