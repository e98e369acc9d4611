"""comparison.html in a real browser, on a phone and on a desktop, light and dark, with names that
are too long for its figures."""

import pytest

from specdistill.evaluation.comparison.compare import compare
from specdistill.evaluation.comparison.pages import render_comparison_html
from tests.browser import look
from tests.simulated import DRAFT_STEP, simulated_candidate

PROBE = """
found({
  dark: matchMedia("(prefers-color-scheme: dark)").matches,
  ink: getComputedStyle(document.querySelector(".verdict.good")).color,
  figures: document.querySelectorAll("figure svg").length,
  links: [...document.querySelectorAll("#candidates a")].map(link => link.getAttribute("href")),
  scrolls: [...document.querySelectorAll(".scroll")]
    .filter(table => table.scrollWidth > table.clientWidth).length,
});
"""
NAMES = [
    "small-eagle3-rate-1e-3-regenerated-50M-draft",
    "small-eagle3-rate-1e-3-corpus-draft",
    f"{'a_name_without_end_' * 4}<script>",
]


@pytest.fixture(scope="module")
def page() -> str:
    curves = [[[100, 1.6], [400, 2.1]], [[100, 1.5], [400, 2.1]], [[100, 1.5], [1_000_000, 2.4]]]
    drafts = [
        simulated_candidate(
            name,
            conditional=(0.75 - index / 50, 0.7, 0.65, 0.6),
            draft_step=(1 + index) * DRAFT_STEP,
            parameters=1_230_000_000,
            training={"seconds": 141.0, "steps": curve[-1][0], "curve": curve},
        )
        for index, (name, curve) in enumerate(zip(NAMES, curves, strict=True))
    ]
    return render_comparison_html(compare(drafts))


@pytest.mark.browser
@pytest.mark.long
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1200])
def test_the_page_fits_the_screen_in_light_and_dark(
    page: str, tmp_path, width: int, dark: bool
) -> None:
    found = look(page, PROBE, tmp_path, width=width, dark=dark)
    assert (found["overflow"], found["clipped"], found["figures"]) == (False, [], 1)
    assert found["links"] == [
        f"{name.replace('<', '%3C').replace('>', '%3E')}/report.html" for name in NAMES
    ]
    assert found["dark"] is dark
    colours = (
        ("rgb(19, 21, 24)", "rgb(98, 207, 168)")
        if dark
        else ("rgb(255, 255, 255)", "rgb(11, 122, 91)")
    )
    assert (found["paper"], found["ink"]) == colours
    assert found["scrolls"] == 0  # on a phone a row is a card
