"""A page in headless Chromium: whether it complains, whether it fits, and what a script finds in it."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# A window has a least width of some 500 pixels, a frame has none: the page is shown in a frame, which counts as its viewport.
FRAME = (
    '<!doctype html><meta charset="utf-8"><iframe style="border: 0; width: {width}px; height: 900px" srcdoc="{page}"></iframe>'
)
WATCH = """<script>
window.problems = [];
window.addEventListener("error", event => problems.push(String(event.message)));
window.addEventListener("securitypolicyviolation", event => problems.push(event.blockedURI));
window.found = answer => {
  parent.document.title = JSON.stringify({
    problems,
    overflow: document.documentElement.scrollWidth > document.documentElement.clientWidth,
    ...answer,
  });
};
</script>"""


def look(page: str, script: str, folder: Path, *, width: int = 500, dark: bool = False) -> dict[str, Any]:
    """What `script`, run at the page's end, hands to `found({...})`; besides, `problems` and whether the page overflows sideways.

    width: of the viewport, in CSS pixels; folder: for the browser's files. Anything in the console is a failure.
    """
    watched = page.replace("<style>", WATCH + "<style>", 1).replace("</body>", f"<script>{script}</script></body>")
    framed = folder / "framed.html"
    framed.write_text(FRAME.format(width=width, page=html.escape(watched)), encoding="utf-8")
    browser = next(path for name in BROWSERS if (path := shutil.which(name)))
    command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0"]
    command += [f"--user-data-dir={folder / 'profile'}", f"--window-size={max(width, 500)},900", "--virtual-time-budget=3000"]
    command += [f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--dump-dom", framed.as_uri()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ":CONSOLE" not in result.stderr, result.stderr
    title = re.search(r"<title>(.*?)</title>", result.stdout, re.DOTALL)
    assert title is not None, result.stderr
    answer: dict[str, Any] = json.loads(html.unescape(title[1]))
    return answer
