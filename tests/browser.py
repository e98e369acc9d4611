"""A page in headless Chromium: its errors, its layout, and what a script finds in it."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# A window is at least some 500 pixels wide, a frame may be narrower: the page is shown in a frame,
# which counts as its viewport.
FRAME = (
    '<!doctype html><meta charset="utf-8"><iframe style="border: 0; width: {width}px; height:'
    ' 900px" srcdoc="{page}"></iframe>'
)
WATCH = """<script>
window.problems = [];
window.addEventListener("error", event => problems.push(String(event.message)));
window.addEventListener("securitypolicyviolation", event => problems.push(event.blockedURI));
window.found = answer => {
  parent.document.title = JSON.stringify({
    problems,
    overflow: document.documentElement.scrollWidth > document.documentElement.clientWidth,
    clipped: [...document.querySelectorAll("svg text")].filter(text => {
      const box = text.getBBox(), view = text.ownerSVGElement.viewBox.baseVal;
      return box.x < -2 || box.y < 0
        || box.x + box.width > view.width + 2 || box.y + box.height > view.height;
    }).map(text => text.textContent),
    paper: getComputedStyle(document.body).backgroundColor,
    ...answer,
  });
};
</script>"""


OPENED = """<script>
window.addEventListener("load", () => {
  document.body.getBoundingClientRect();
  document.title = JSON.stringify({
    seconds: performance.now() / 1000,
    requests: performance.getEntriesByType("resource").length,
  });
});
</script>"""


def opening(page: str, folder: Path) -> dict[str, Any]:
    """Measure the opening of a page, a file.

    `seconds` last until the page is laid out and its scripts have run; `requests` counts those that
    it made.
    """
    path = folder / "opened.html"
    path.write_text(page.replace("</body>", f"{OPENED}</body>"), encoding="utf-8")
    answer: dict[str, Any] = json.loads(_title(_browse(path, folder)))
    return answer


def look(
    page: str, script: str, folder: Path, *, width: int = 500, dark: bool = False
) -> dict[str, Any]:
    """Run `script` at the page's end, and return what it hands to `found({...})`.

    The result also says whether the page overflows sideways, what figures cut off of their text,
    and `paper`, the colour behind the page. An error and anything in the console is a failure.

    width: of the viewport, in CSS pixels. folder: for the browser's files.
    """
    watched = page.replace("<style>", WATCH + "<style>", 1).replace(
        "</body>", f"<script>{script}</script></body>"
    )
    framed = folder / "framed.html"
    framed.write_text(FRAME.format(width=width, page=html.escape(watched)), encoding="utf-8")
    colours = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    result = _browse(
        framed,
        folder,
        f"--window-size={max(width, 500)},900",
        "--virtual-time-budget=3000",
        colours,
    )
    assert ":CONSOLE" not in result.stderr, result.stderr
    answer: dict[str, Any] = json.loads(_title(result))
    assert answer.pop("problems") == []
    return answer


def _browse(page: Path, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    browser = next(path for name in BROWSERS if (path := shutil.which(name)))
    command = [
        browser,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        "--v=0",
        "--dump-dom",
    ]
    command += [f"--user-data-dir={folder / 'profile'}", *options, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def _title(result: subprocess.CompletedProcess[str]) -> str:
    title = re.search(r"<title>(.*?)</title>", result.stdout, re.DOTALL)
    assert title is not None, result.stderr
    return html.unescape(title[1])
