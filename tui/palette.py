"""Style words (`bold $text-primary on $surface`) as terminal styles, for panes that paint their own lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.style import Style as TerminalStyle
from textual.style import Style

if TYPE_CHECKING:
    from textual.app import App

_cache: dict[tuple[str, str], TerminalStyle] = {}


def paint(app: App[object], words: str) -> TerminalStyle:
    """The style that `words` mean under the present theme."""
    key = (app.theme, words)
    style = _cache.get(key)
    if style is None:
        style = _cache[key] = Style.parse(words, app.theme_variables).rich_style if words else TerminalStyle.null()
    return style
