"""Uses the HTML report in a headless Chromium as a reader does.

    python tools report_pages --ckpt-opt BINARY OUT MODEL… [-- OPTIONS OF ckpt-opt plan]

For every model a plan is made with --report FILE.html, and the page is opened without a network:

  loads        the page requests nothing but itself, and the console stays silent
  hover        the pointer over the picture, and the keys of the slider, show what is held
  search       words, decisions, layers and column heads change the table; the count shows how many rows are left
  keyboard     Tab reaches every control, and the focus is visible
  fits         the page does not scroll sideways at 1280 and at 390 pixels
  axe          axe-core finds no serious or critical violation, light and dark, wide and narrow
  quick        each of these answers within LIMIT_MS, and the page loads within LOADING_MS

OUT receives MODEL-light.png, -dark.png, -narrow.png (each whole) and -print.pdf. Needs tools/requirements-browser.txt and
Chromium ($CHROMIUM, or chromium in PATH). Exit code 1 if anything fails.
"""

import os
import shutil
import sys
import time
from pathlib import Path

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Locator, Page, sync_playwright

from tools.lib import options
from tools.lib.compiler import Compiler, Refused

LIMIT_MS = 1000
LOADING_MS = 3000
# name, colour scheme, width, height in CSS pixels
VIEWS = [
    ("light", "light", 1280, 900),
    ("dark", "dark", 1280, 900),
    ("narrow", "light", 390, 844),
    ("narrow-dark", "dark", 390, 844),
]
SERIOUS = ("serious", "critical")


def chromium() -> str:
    names = [os.environ.get("CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome"]
    for name in names:
        found = shutil.which(name) if name else None
        if found:
            return found
    sys.exit("report_pages: no Chromium; install one, or name it in the variable CHROMIUM")


class Checks:
    """The failures so far, and the time of the slowest step."""

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.slowest_ms = 0.0

    def holds(self, fact: bool, text: str) -> None:
        if not fact:
            self.wrong.append(text)

    def timed(self, what: str, act, limit_ms: float = LIMIT_MS) -> None:
        start = time.perf_counter()
        act()
        taken_ms = 1e3 * (time.perf_counter() - start)
        self.slowest_ms = max(self.slowest_ms, taken_ms)
        self.holds(taken_ms < limit_ms, f"{what} took {taken_ms:.0f} ms")


def settle(page: Page) -> None:
    """Waits for two frames, so that the page is drawn."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def hover(page: Page, checks: Checks) -> None:
    picture = page.locator("#memory")
    picture.scroll_into_view_if_needed()
    box = picture.bounding_box()

    def read() -> str:
        settle(page)
        return page.locator("#where").inner_text()

    seen = set()
    for part in (0.3, 0.6, 0.9):

        def move(part=part) -> None:
            page.mouse.move(box["x"] + box["width"] * part, box["y"] + box["height"] / 2)
            settle(page)

        checks.timed("hover", move)
        seen.add(read())
    checks.holds(len(seen) == 3, f"hover told {seen}")
    slider = page.locator("#cursor")
    slider.focus()
    slider.press("Home")
    checks.holds(read().startswith("Node 1 of"), f"Home told {read()}")
    slider.press("ArrowRight")
    checks.holds(read().startswith("Node 2 of"), f"an arrow told {read()}")
    page.locator("#to-peak").click()
    rows = page.locator("#kinds tbody tr").count()
    checks.holds(rows > 1, "no kinds at the peak")


def search(page: Page, checks: Checks) -> None:
    def count() -> int:
        return int(page.locator("#count").inner_text().split()[0])

    def cell(column: int) -> Locator:
        return page.locator(f"#values tbody tr:not(.space) td:nth-child({column})").first

    every = count()
    checks.holds(every > 0, "no values")
    name = cell(1).inner_text()

    def type_it() -> None:
        page.locator("#search").fill(name)
        settle(page)

    checks.timed("search", type_it)
    checks.holds(0 < count() < every or every == 1, f"searching `{name}` left {count()} of {every}")
    checks.holds(name in cell(1).inner_text(), "the first row is not the one searched for")
    page.locator("#search").fill("no such name anywhere")
    checks.holds(count() == 0, "a name that is nowhere was found")
    page.locator("#search").fill("")
    page.locator("#fate").select_option(label="kept")
    kept = count()
    checks.holds(kept < every, "choosing a decision changed nothing")
    page.locator("#fate").select_option(index=0)
    layers = page.locator("#layers button")
    if layers.count():
        checks.timed("layer", lambda: (layers.last.click(), settle(page)))
        checks.holds(0 < count() < every, f"a layer has {count()} of {every} values")
        checks.holds(layers.last.get_attribute("aria-pressed") == "true", "a chosen layer does not say so")
        layers.last.click()
    checks.holds(count() == every, "choosing a layer twice does not undo it")
    cell(1).locator("button").press("Enter")
    told = page.locator("#chosen").inner_text()
    checks.holds(cell(1).inner_text() in told and "Decision" in told, f"a chosen value tells `{told}`")
    heads = page.locator("#values thead button")
    checks.timed("sort", lambda: (heads.first.click(), settle(page)))
    sorted_by = page.locator("#values thead th").first.get_attribute("aria-sort")
    checks.holds(sorted_by in ("ascending", "descending"), f"the sorted column says {sorted_by}")
    checks.timed(
        "scroll", lambda: (page.locator("#scroll").evaluate("(e) => { e.scrollTop = e.scrollHeight }"), settle(page))
    )
    shown = page.locator("#values tbody tr:not(.space)").count()
    checks.holds(0 < shown < 200, f"{shown} rows in the page at the end of the table")


FOCUS = """() => {
  const e = document.activeElement, s = getComputedStyle(e);
  return [e.id || e.className || e.textContent.slice(0, 20), e.tagName, s.outlineStyle !== "none" && parseFloat(s.outlineWidth) >= 2];
}"""


def keyboard(page: Page, checks: Checks) -> None:
    """Presses Tab from the top until every control outside the grid of layers was reached."""
    wanted = {"axis", "stack", "to-peak", "to-peak-before", "cursor", "search", "fate", "layer", "scroll"}
    page.evaluate("() => { scrollTo(0, 0); document.activeElement.blur(); }")
    limit = 60 + page.locator("#layers button").count()
    for _ in range(limit):
        page.keyboard.press("Tab")
        name, tag, is_shown = page.evaluate(FOCUS)
        if tag == "BODY":
            break
        checks.holds(is_shown, f"the focus on {name} does not show")
        wanted.discard(name)
        if not wanted:
            break
    checks.holds(not wanted, f"Tab never reaches {sorted(wanted)}")


def violations(page: Page) -> list[str]:
    found = Axe().run(page).response["violations"]
    return [f"axe {v['id']} ({v['impact']}): {v['nodes'][0]['html'][:160]}" for v in found if v["impact"] in SERIOUS]


def view(browser, path: Path, out: Path, name: str, scheme: str, width: int, height: int) -> Checks:
    checks = Checks()
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": height}, offline=True)
    page = context.new_page()
    asked: list[str] = []
    said: list[str] = []
    page.on("request", lambda r: asked.append(r.url))
    page.on("console", lambda m: said.append(m.text))
    page.on("pageerror", lambda e: said.append(str(e)))
    address = path.resolve().as_uri()
    checks.timed("loading", lambda: (page.goto(address), settle(page)), LOADING_MS)
    sideways = page.evaluate("() => document.documentElement.scrollWidth - document.documentElement.clientWidth")
    checks.holds(sideways <= 0, f"the page is {sideways} pixels too wide")
    page.screenshot(path=out / f"{path.stem}-{name}.png", full_page=True)
    keyboard(page, checks)
    hover(page, checks)
    search(page, checks)
    checks.wrong += violations(page)
    if name == "light":
        page.pdf(path=out / f"{path.stem}-print.pdf", format="A4", print_background=True)
    # A page of data: nothing but itself, and the icon that it holds.
    others = [a for a in asked if a != address and not a.startswith("data:")]
    checks.holds(not others, f"asked for {others}")
    checks.holds(not said, f"the console says {said}")
    context.close()
    return checks


def main() -> int:
    arguments, planning = options.split_at_dashes()
    parser = options.with_binary(__doc__)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL")
    args = parser.parse_args(arguments)
    compiler, out = Compiler(args.ckpt_opt), args.out
    out.mkdir(parents=True, exist_ok=True)
    failed = 0
    with sync_playwright() as driver:
        # Inside a container Chromium's own sandbox cannot be had; the page is ours.
        browser = driver.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        for model in args.models:
            path = out / f"{model.stem}.html"
            try:
                compiler.call("plan", model, "--report", path, *(planning or []))
            except Refused as refused:
                print(f"{model}: {refused}", file=sys.stderr)
                failed += 1
                continue
            for name, scheme, width, height in VIEWS:
                checks = view(browser, path, out, name, scheme, width, height)
                verdict = "FAILED" if checks.wrong else "good"
                print(
                    f"{model}: {name}, {path.stat().st_size} bytes, slowest step {checks.slowest_ms:.0f} ms: {verdict}"
                )
                for line in checks.wrong:
                    print(f"  {line}")
                failed += bool(checks.wrong)
        browser.close()
    return 1 if failed else 0
