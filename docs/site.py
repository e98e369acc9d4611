"""Hooks of mkdocs: add pages outside docs/ and generated ones, and lead links.

Links lead to pages of the site, or to files of the repository.
"""

import re
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.utils import get_relative_url
from reference import build_reference

from specdistill.evaluation.report.files import read_report, to_html

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
# rendered from its JSON files, so that the site shows the page as it is now
SAMPLE = "sample/report.html"
# Sections that say where the generated pages are: on the site links to them lead to these pages.
GENERATED = {
    "commands.md#recipe-keys": "reference/recipe.md",
    "python.md#reference": "reference/python.md",
    "report.md#all-fields": "reference/report-schema.md",
}
# mermaid.min.js of Mermaid, which the package mermaidx carries unchanged. Material would fetch it
# from unpkg.com.
MERMAID = "assets/javascripts/mermaid.js"
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!\w+:)([^)#\s]+)(#[^)\s]*)?\)")
THREAD = re.compile(r"(?<![\w/])([\w.-]+/[\w.-]+)#(\d+)\b")


def on_config(config: Any) -> Any:
    """Let each page link to its file in the repository, for editing."""
    if config.repo_url:
        config.edit_uri = "edit/main/docs/"
    return config


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages outside docs/, the reference and the script that draws diagrams."""
    for name, page in OUTSIDE.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    for page, text in build_reference(ROOT).items():
        files.append(File.generated(config, page, content=text))
    report = to_html(*read_report(ROOT / "docs" / "sample"))
    files.append(File.generated(config, SAMPLE, content=report))
    script = (package_files("mermaidx") / "assets" / "mermaid.js").read_text(encoding="utf-8")
    files.append(File.generated(config, MERMAID, content=script))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Lead links to the site's page or image, or else into the repository; link threads."""
    if page.file.src_uri.startswith("reference/"):
        return markdown
    folder = ROOT if page.file.src_uri in OUTSIDE.values() else ROOT / "docs"

    def led(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        path = (folder / target).resolve()
        name = path.relative_to(ROOT).as_posix()
        if name in OUTSIDE:
            return f"[{text}]({OUTSIDE[name]}{anchor})"
        if path.is_relative_to(ROOT / "docs"):
            page_name = name.removeprefix("docs/")
            if name == "docs/sample/report.md":
                page_name = SAMPLE
            address = f"{page_name}{anchor}"
            return f"[{text}]({GENERATED.get(address, address)})"

        # A file of the repository. Without the repository's address there is nothing to link to, so
        # write the file's path.
        if not config.repo_url:
            return text if name in text else f"{text} (`{name}`)"
        kind = "tree" if path.is_dir() else "blob"
        return f"[{text}]({config.repo_url.rstrip('/')}/{kind}/main/{name}{anchor})"

    return THREAD.sub(r"[\g<0>](https://github.com/\1/issues/\2)", LINK.sub(led, markdown))


def on_post_page(output: str, *, page: Any, config: Any) -> str:
    """Load the script of diagrams into pages that have some."""
    if '<pre class="mermaid">' in output:
        script = get_relative_url(MERMAID, page.url)
        output = output.replace("</body>", f'<script src="{script}"></script></body>')
    return fetch_no_stars(output)


def on_post_template(output_content: str, *, template_name: str, config: Any) -> str:
    """Change pages without Markdown, such as the one of a missing address."""
    return fetch_no_stars(output_content)


def fetch_no_stars(html: str) -> str:
    """Remove the attribute for which Material fetches a repository's stars from GitHub."""
    return html.replace(' data-md-component="source"', "")
