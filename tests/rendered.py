"""Markdown as a page shows it, rendered by markdown-it.

It is searched for what GitHub makes links of by the patterns of pymdown-extensions.
"""

import re
from html.parser import HTMLParser
from typing import Any

from markdown_it import MarkdownIt
from pymdownx import magiclink

HOSTILE = (
    "<img src=x>@org/team ![x](http://a.example) https://github.com/org/repo/issues/1 www.c.example"
    " eve@d.example #12 org/repo#3 GH-4 `a` | &#64;org &lt;img&gt; **x** ~~~ $x$ __y__ <!--\n\n#"
    " h\n\n~~~\n- <@org> \x1b[2J\n```\n[z]: http://e.example\n"
)
REFERENCES = (
    magiclink.RE_LINK,
    magiclink.RE_MAIL,
    magiclink.RE_INT_MENTIONS.format(magiclink.RE_GITHUB_USER),
    magiclink.RE_GIT_INT_EXT_REFS.format(magiclink.RE_GITHUB_USER),
    magiclink.RE_GIT_INT_MICRO_REFS,
    r"(?i)\bgh-\d",
)
KEPT = ("verdict", "severity", "better", "metric", "method")


class Page(HTMLParser):
    """A rendered page.

    elements: (tag, attributes) of each. texts: those outside of code, in which GitHub looks for
    references.
    """

    def __init__(self, markdown: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, Any]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(markdown))
        self.close()

    @property
    def references(self) -> list[str]:
        return [
            found[0]
            for text in self.texts
            for pattern in REFERENCES
            for found in re.finditer(pattern, text)
        ]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, attrs))
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        self.open.remove(tag)

    def handle_data(self, data: str) -> None:
        if "code" not in self.open:
            self.texts.append(data)


def renamed(document: Any, more: str) -> Any:
    """Return a document with `more` at the end of every name and sentence in it.

    Words of this project stay as they are.
    """
    if isinstance(document, dict):
        return {
            key: value if key in KEPT else renamed(value, more) for key, value in document.items()
        }
    if isinstance(document, list):
        return [renamed(value, more) for value in document]
    return f"{document} {more}" if isinstance(document, str) and document != "all" else document
