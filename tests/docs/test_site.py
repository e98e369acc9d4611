"""The site of docs/ builds without a warning, has every page and loads nothing from elsewhere."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

import specdistill
from specdistill.cli.main import VERBS
from specdistill.common.project import ROOT
from specdistill.evaluation.report.files import read_report, to_picture
from specdistill.evaluation.report.phrases import format_verdict
from specdistill.evaluation.report.text import to_markdown
from tests.documented import list_verb_keys

# yaml cannot load the whole file, which has tags of mkdocs' own loader; the navigation has none.
NAVIGATION = yaml.safe_load(
    "nav:" + (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
)["nav"]
REPOSITORY = "https://git.example/team/specdistill"
LOADED = re.compile(
    r"<(?:link|script|img|iframe)\b[^>]*?\b(?:src|href)=\"?((?:https?:)?//[^\"\s>]+)"
)
IMPORTED = re.compile(r"(?:@import\s+|url\()[\"']?((?:https?:)?//[^\"')]+)")


def list_pages(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [
        page
        for part in (nav.values() if isinstance(nav, dict) else nav)
        for page in list_pages(part)
    ]


def test_navigation_has_every_page_once() -> None:
    # docs/site.py adds these two and the pages in reference/
    others = ["contributing.md", "changelog.md"]
    pages = [page for page in list_pages(NAVIGATION) if not page.startswith("reference/")]
    assert sorted(pages) == sorted([*others, *(page.name for page in (ROOT / "docs").glob("*.md"))])


def test_pages_are_short() -> None:
    """The generated tables of recipes and of supported models do not count."""
    text = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))
    text = re.sub(r"<!-- (recipes|kinds) -->.*?<!-- /\1 -->", "", text, flags=re.DOTALL)
    assert len([word for word in text.split() if re.search(r"\w", word)]) <= 20_000


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
    """Build the site as `make site` does and return its folder; any warning fails.

    A link that leads nowhere is such a warning.
    """
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
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "REPO_URL": REPOSITORY},
    )
    assert result.returncode == 0, result.stderr
    assert "WARNING" not in result.stderr
    return folder


@pytest.mark.long  # builds the site
def test_site_is_whole_and_loads_nothing_from_elsewhere(site: Path) -> None:
    pages, styles = sorted(site.rglob("*.html")), sorted(site.rglob("*.css"))
    assert len(pages) > 20
    assert styles
    texts = {path: path.read_text(encoding="utf-8") for path in [*pages, *styles]}
    found = {
        str(path.relative_to(site)): [*LOADED.findall(text), *IMPORTED.findall(text)]
        for path, text in texts.items()
    }
    assert {name: links for name, links in found.items() if set(links) - {REPOSITORY}} == {}
    # Material fetches the script of diagrams from unpkg.com, unless the page has loaded one, and
    # the stars of a repository from GitHub, for a link with this attribute.
    drawn = [path for path in pages if 'class="mermaid"' in texts[path]]
    assert site / "methods" / "index.html" in drawn
    for path in drawn:
        (script,) = re.findall(r'<script src="([^"]+mermaid\.js)"></script>', texts[path])
        assert (path.parent / script).resolve().is_file(), path
    assert 'data-md-component="source"' not in "".join(texts.values())

    # Links lead to a page of the site, or to a file of the repository that exists. Numbers of
    # threads are links.
    prefix = f"{REPOSITORY}/"
    links = {link for page in pages for link in re.findall(rf'href="{prefix}([^"#]+)', texts[page])}
    assert "blob/main/specdistill/training/losses/divergence.py" in links
    assert [
        link
        for link in links
        if not (ROOT / re.sub(r"^(?:blob|tree|edit)/main/", "", link)).exists()
    ] == []
    overview, threads = texts[site / "index.html"], texts[site / "troubleshooting" / "index.html"]
    assert (
        'href="your-target/"' in overview
        and f'href="{REPOSITORY}/edit/main/docs/index.md"' in overview
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


@pytest.mark.long  # builds the site
def test_reference_has_every_key_every_field_and_every_name(site: Path) -> None:
    pages = {
        page.parent.name: page.read_text(encoding="utf-8")
        for page in (site / "reference").glob("*/index.html")
    }
    assert {f"reference/{name}.md" for name in pages} <= set(list_pages(NAVIGATION))
    text = "".join(pages.values())
    for verb in VERBS:
        assert f">specdistill {verb}<" in text or f'id="specdistill-{verb}"' in text
        keys = {key for key in list_verb_keys(verb) if re.fullmatch(r"[a-z_]+(\.[a-z_]+)*", key)}
        assert {key for key in keys - {"recipe"} if f"<code>{key}</code>" not in text} == set(), (
            verb
        )
    names = set(re.findall(r'id="specdistill\.api\.(\w+)"', pages["python"]))
    assert names == set(specdistill.__all__)
    assert "<code>mean_acceptance_length</code>" in pages["report-schema"]
