"""The tables that benchmarks write into pages of the documentation."""

from pathlib import Path


def write_between(page: Path, mark: str, text: str) -> None:
    """Replace the text of a Markdown page between `<!-- mark -->` and `<!-- /mark -->`.

    Nothing else in the page changes.
    """
    # Split the page at both marks. The page must have them.
    before, begin, rest = page.read_text(encoding="utf-8").partition(f"<!-- {mark} -->\n")
    _, end, after = rest.partition(f"<!-- /{mark} -->")
    assert begin and end, (page, mark)
    page.write_text(f"{before}{begin}{text}\n{end}{after}", encoding="utf-8")
