"""Hooks of mkdocs: add pages outside docs/ and the sample report's page, and lead links.

Links lead to pages of the site, or to files of the repository.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from specdistill.evaluation.report.files import read_report, to_html

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
# rendered from its JSON files, so that the site shows the page as it is now
SAMPLE = "sample/report.html"
LINK = re.compile(r"(?<=\]\()(?!\w+:)([^)#\s]+)")
THREAD = re.compile(r"(?<![\w/])([\w.-]+/[\w.-]+)#(\d+)\b")


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages outside docs/."""
    for name, page in OUTSIDE.items():
        files.append(
            File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8"))
        )
    files.append(
        File.generated(config, SAMPLE, content=to_html(*read_report(ROOT / "docs" / "sample")))
    )
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Lead links to the site's page or image, or else into the repository; link threads."""
    folder = ROOT if page.file.src_uri in OUTSIDE.values() else ROOT / "docs"

    def led(link: re.Match[str]) -> str:
        path = (folder / link[0]).resolve()
        name = path.relative_to(ROOT).as_posix()
        if name in OUTSIDE:
            return OUTSIDE[name]
        if path.is_relative_to(ROOT / "docs"):
            return SAMPLE if name == "docs/sample/report.md" else name.removeprefix("docs/")
        return f"{config.extra['repository']}/{'tree' if path.is_dir() else 'blob'}/main/{name}"

    return THREAD.sub(r"[\g<0>](https://github.com/\1/issues/\2)", LINK.sub(led, markdown))
