"""The site of docs/: every page is in its navigation, it builds without a warning, and it loads
nothing from elsewhere."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdistill.common.project import ROOT
from specdistill.evaluation.report.files import read_report, to_picture
from specdistill.evaluation.report.phrases import format_verdict
from specdistill.evaluation.report.text import to_markdown

CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
LOADED = re.compile(
    r"<(?:link|script|img|iframe)\b[^>]*?\b(?:src|href)=\"?((?:https?:)?//[^\"\s>]+)"
)
IMPORTED = re.compile(r"(?:@import\s+|url\()[\"']?((?:https?:)?//[^\"')]+)")


def leaves(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [
        page for part in (nav.values() if isinstance(nav, dict) else nav) for page in leaves(part)
    ]


def test_navigation_has_every_page_once() -> None:
    others = ["contributing.md", "changelog.md"]  # docs/site.py adds these
    assert sorted(leaves(CONFIG["nav"])) == sorted(
        [*others, *(page.name for page in (ROOT / "docs").glob("*.md"))]
    )


def test_the_sample_report_is_what_the_code_makes_of_its_numbers() -> None:
    report, records = read_report(ROOT / "docs/sample")
    again = "python -m bench.sample report=docs/sample"
    assert (ROOT / "docs/sample/report.md").read_text(encoding="utf-8") == to_markdown(report), (
        again
    )
    assert (ROOT / "docs/images/report.svg").read_text(encoding="utf-8") == to_picture(
        report, records
    ), again
    assert sum(path.stat().st_size for path in (ROOT / "docs/sample").iterdir()) < 1_000_000


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, as `make site` builds it: a link that leads nowhere or any other warning fails."""
    if find_spec("material") is None:
        pytest.skip("needs mkdocs-material: make setup")
    folder = tmp_path_factory.mktemp("site")
    result = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert result.returncode == 0, result.stderr
    assert "WARNING" not in result.stderr
    return folder


def test_site_is_whole_and_loads_nothing_from_elsewhere(site: Path) -> None:
    pages, styles = sorted(site.rglob("*.html")), sorted(site.rglob("*.css"))
    assert len(pages) > 20
    assert styles
    texts = {path: path.read_text(encoding="utf-8") for path in [*pages, *styles]}
    found = {
        str(path.relative_to(site)): [*LOADED.findall(text), *IMPORTED.findall(text)]
        for path, text in texts.items()
    }
    assert {
        name: links for name, links in found.items() if set(links) - {CONFIG["extra"]["repository"]}
    } == {}
    # drawn by a script of unpkg.com
    assert "mermaid" not in "".join(re.findall(r'class="[^"]*"', "".join(texts.values())))

    # What the pages link to is a page of the site, or a file of the repository that exists; threads
    # are links
    prefix = f"{CONFIG['extra']['repository']}/"
    links = {link for page in pages for link in re.findall(rf'href="{prefix}([^"#]+)', texts[page])}
    assert "blob/main/specdistill/training/losses/divergence.py" in links
    assert [
        link for link in links if not (ROOT / re.sub(r"^(?:blob|tree)/main/", "", link)).exists()
    ] == []
    overview, threads = texts[site / "index.html"], texts[site / "troubleshooting" / "index.html"]
    assert (
        'href="your-target/"' in overview
        and 'src="images/report.svg"' in overview
        and 'href="sample/report.html"' in overview
    )
    sample = texts[site / "sample" / "report.html"]
    assert (
        f"<title>{format_verdict(read_report(ROOT / 'docs/sample')[0])}: " in sample
        and (site / "sample" / "report.json").is_file()
    )
    assert (
        '<a href="https://github.com/vllm-project/speculators/issues/684">vllm-project/speculators#684</a>'
        in threads
    )
