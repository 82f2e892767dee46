"""The page of ``gradtrace report`` in a real browser: Debian's Chromium, without a network."""

from __future__ import annotations

import itertools
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from gradtrace.analysis.report.folding import MOST_MODULES
from gradtrace.analysis.run import open_run
from gradtrace.printable import printable
from gradtrace.trace.runinfo import ModuleInfo
from gradtrace.trace.schema import Record
from tests.hostile import ALL, write_hostile_run
from tests.hostile import NAMES as HOSTILE_NAMES
from tests.traces import write_run

NAMES = ("", "body", "body.0", "body.0.linear", "body.1", "body.1.linear", "head")
TYPES = ("Net", "Sequential", "Block", "Linear", "Block", "Linear", "Linear")
MODULES = [
    ModuleInfo(name, kind, root=not name, depth=name.count(".") + bool(name), calls=1, parameters={"weight": "[2, 2]"})
    for name, kind in zip(NAMES, TYPES, strict=True)
]
STEPS = 40
FAILING = 30
HOSTILE = (
    "</script><script>window.broken = 1</script>",
    '"><img src=x onerror="window.broken = 1">',
    "<b>bold</b> &amp; %{x} <a href='https://example.org'>link</a>",
    "line\nbreak\u2028 'quotes' \\ ${window.broken = 1} 🔥",
)
CROSS = "\N{MULTIPLICATION SIGN}"


def step_rows(step: int, seq: int, names: tuple[str, ...], *, bad: bool) -> Iterator[Record]:
    """One pass through the modules; ``bad`` makes the output of the fourth one NaN, and all that follows."""
    for place, name in enumerate(names):
        counts = {"nan_count": 3 if bad and place >= 3 else 0, "posinf_count": 0, "neginf_count": 0, "numel": 4}
        size = 10.0 ** (place - 2) * (1 + step / STEPS)
        values = counts | {"min": -size, "max": size, "norm": 2 * size, "dtype": "float32", "shape": "[4]", "call": 0}
        yield Record(step, seq + 2 * place, "forward", "input", name, "0", **(values | {"nan_count": 0}))  # type: ignore[arg-type]
        yield Record(step, seq + 2 * place + 1, "forward", "output", name, "0", **values)  # type: ignore[arg-type]
    nan = {"nan_count": int(bad), "posinf_count": 0, "neginf_count": 0, "numel": 1}
    loss = None if bad else 5.0 / (1 + step)
    yield Record(step, seq + 50, "loss", "loss", min=loss, max=loss, norm=loss, **nan)  # type: ignore[arg-type]
    yield Record(step, seq + 51, "optimizer", "lr", path="0.0", max=1e-3, min=1e-3, norm=1e-3, nan_count=0)


def write_page(
    folder: Path, *, names: tuple[str, ...] = NAMES, failing: int | None = FAILING, steps: int = STEPS
) -> Path:
    """Record such a run, failing from a step on or not at all, and return its page."""
    rows = [
        row
        for step in range(steps)
        for row in step_rows(step, 100 * step, names, bad=failing is not None and step >= failing)
    ]
    rows.append(Record(7, 100 * 7 + 99, "event", "skip", detail="the optimizer step was skipped"))
    modules = MODULES if names is NAMES else [ModuleInfo(name, name, root=not name, depth=1) for name in names]
    path = write_run(folder / "run.parquet", rows, modules=modules, command=["train.py", "--token", "<b>***</b>"])
    with open_run(path) as run:
        return run.report(folder / "run.html")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    executable = shutil.which("chromium")
    assert executable, "chromium is not on PATH; make test-integrations installs it"
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def failing_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(tmp_path_factory.mktemp("failing"))


class Visit:
    """A page in a window of its own, and all that it complained about or asked for."""

    def __init__(self, browser: Browser, path: Path, **options: Any) -> None:
        self.context = browser.new_context(viewport={"width": 1280, "height": 900}, **options)
        self.page: Page = self.context.new_page()
        self.complaints: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self._note_request(request.url, path.as_uri()))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("html[data-ready=true]", timeout=120_000)

    def _note_request(self, url: str, own: str) -> None:
        if url != own and not url.startswith(("data:image/", "blob:")):
            self.complaints.append(f"asked for {url}")

    def close(self) -> None:
        self.context.close()
        assert self.complaints == []

    def until(self, condition: str) -> None:
        """Wait for what the page may take its time for; it allows no eval, so it is asked from here."""
        deadline = time.monotonic() + 60
        while not self.page.evaluate(condition):
            assert time.monotonic() < deadline, f"in vain: {condition}"
            self.page.wait_for_timeout(20)

    def rows(self) -> list[str]:
        """The names that the heatmap shows, from top to bottom, without their marks."""
        return self.page.evaluate("heatmapRows.map((row) => DATA.modules.name[row.module])")

    def point_at_cell(self, name: str, step: int) -> str:
        """Put the pointer onto a cell and return what is said of it."""
        self.page.mouse.move(1, 1)
        self.page.mouse.move(*self._place_of(name, step))
        self.page.wait_for_selector("#tip:visible")
        return self.page.locator("#tip").inner_text()

    def click_cell(self, name: str, step: int) -> None:
        self.point_at_cell(name, step)
        self.page.mouse.down()
        self.page.mouse.up()

    def _place_of(self, name: str, step: int) -> list[float]:
        row = self.rows().index(name)
        self.page.locator("#heatmap").scroll_into_view_if_needed()
        place: list[float] = self.page.evaluate(
            """([row, step]) => {
                const {xaxis, yaxis} = HEATMAP._fullLayout, box = HEATMAP.getBoundingClientRect();
                return [box.left + xaxis._offset + xaxis.d2p(step), box.top + yaxis._offset + yaxis.d2p(row)];
            }""",
            [row, step],
        )
        return place

    def lines(self) -> list[dict[str, Any]]:
        """The lines of modules: name, values, axis."""
        return self.page.evaluate("LINES.data.map(({name, y, yaxis}) => ({name, y, yaxis}))")


@pytest.fixture
def visit(browser: Browser, failing_page: Path) -> Iterator[Visit]:
    visiting = Visit(browser, failing_page)
    yield visiting
    visiting.close()


def test_the_page_opens_without_a_complaint_and_without_asking_for_anything(visit: Visit) -> None:
    assert visit.page.title() == "run.parquet"
    assert visit.page.locator(".headline").inner_text() == (
        "First non-finite value: step 30, forward, body.0.linear (Linear), output 0: 3 nan of 4"
    )
    assert "train.py --token <b>***</b>" in visit.page.locator(".facts").inner_text()


def test_the_path_of_the_failure_ends_at_what_it_reached(visit: Visit) -> None:
    stops = visit.page.locator("ol.path li").all_inner_texts()
    made = [stop for stop in stops if stop.endswith("made")]
    assert len(made) == 1 and "body.0.linear output 0" in made[0] and "3 nan of 4" in made[0]
    assert "loss at step 30" in stops[-1]


def test_what_is_not_finite_has_a_colour_of_its_own_in_the_heatmap(visit: Visit) -> None:
    visit.page.select_option("#tensor", "output")
    z = visit.page.evaluate("HEATMAP.data[0].z")
    rows = visit.rows()
    assert rows == list(NAMES)
    for name, row in zip(rows, z, strict=True):
        bad = NAMES.index(name) >= 3
        assert [value == 1 for value in row] == [bad and step >= FAILING for step in range(STEPS)], name
    scale = visit.page.evaluate("HEATMAP.data[0].colorscale")
    loud = visit.page.evaluate("theme().loud")
    assert [place for place, color in scale if color == loud] == [0.985, 1]
    assert max(value for row in z for value in row if value is not None and value != 1) < 0.985


def test_colours_follow_the_logarithm(visit: Visit) -> None:
    visit.page.select_option("#tensor", "output")
    visit.page.select_option("#statistic", "norm")
    at_start = [row[0] for row in visit.page.evaluate("HEATMAP.data[0].z")]
    gaps = [later - earlier for earlier, later in itertools.pairwise(at_start)]
    assert gaps == pytest.approx([gaps[0]] * 6, rel=1e-3)  # each module's norm is ten times that of the one before
    assert gaps[0] > 0.1


def test_a_click_on_a_cell_shows_the_lines_of_its_module_and_several_can_be_compared(visit: Visit) -> None:
    visit.page.click("#clear")
    visit.page.select_option("#tensor", "output")
    visit.click_cell("head", 12)
    visit.until("LINES.data.length === 3")
    norm, largest, smallest = visit.lines()
    assert norm["name"] == "head"
    assert norm["y"][:2] == pytest.approx([2e4, 2e4 * (1 + 1 / STEPS)])
    assert largest["y"][0] == pytest.approx(1e4) and smallest["y"][0] == pytest.approx(1e4)  # |min| on a log axis
    visit.page.uncheck("#log")
    visit.until("LINES.layout.yaxis.type === 'linear'")
    assert visit.lines()[2]["y"][0] == pytest.approx(-1e4)
    visit.click_cell("body.1", 3)
    visit.until("LINES.data.length === 6")
    assert visit.page.locator("#chosen button").all_inner_texts() == [f"{name} {CROSS}" for name in ("head", "body.1")]
    visit.page.locator("#chosen button").first.click()
    visit.until("LINES.data.length === 3")
    visit.page.click("#clear")
    visit.until("LINES.data.length === 0")


def test_a_name_in_the_table_shows_its_lines_too(visit: Visit) -> None:
    visit.page.click("#clear")
    visit.page.click("#table button:text-is('body.1.linear')")
    visit.until("LINES.data.length === 3 && LINES.data[0].name === 'body.1.linear'")


def test_a_cell_under_the_pointer_says_what_it_holds(visit: Visit) -> None:
    visit.page.select_option("#tensor", "output")
    assert visit.point_at_cell("body.0.linear", FAILING + 1).split("\n") == [
        "body.0.linear",
        f"step {FAILING + 1}",
        "3 nan, 0 inf; finite elements: norm 35.5, min -17.75, max 17.75",  # 2 * 10 * (1 + 31 / 40)
    ]


def test_modules_fold_by_depth_and_by_a_click_and_keep_what_is_not_finite(visit: Visit) -> None:
    visit.page.select_option("#tensor", "output")
    visit.page.select_option("#depth", "1")
    visit.until("heatmapRows.length === 3")
    assert visit.rows() == ["", "body", "head"]
    z = visit.page.evaluate("HEATMAP.data[0].z")
    assert [value == 1 for value in z[1]] == [step >= FAILING for step in range(STEPS)]
    visit.page.locator("#heatmap .ytick text").nth(1).click()
    visit.until("heatmapRows.length === 5")
    assert visit.rows() == ["", "body", "body.0", "body.1", "head"]
    visit.page.select_option("#depth", "3")
    visit.until("heatmapRows.length === 7")


def test_zooming_moves_all_charts_together(visit: Visit) -> None:
    ranges = "CHARTS.map((chart) => chart.layout.xaxis.range)"
    visit.page.evaluate("Plotly.relayout(COURSE, {'xaxis.range[0]': 9.5, 'xaxis.range[1]': 20.5})")
    visit.until(f"{ranges}.every(([a, b]) => a === 9.5 && b === 20.5)")
    assert visit.page.input_value("#from") == "10" and visit.page.input_value("#to") == "20"
    visit.page.fill("#to", "15")
    visit.page.press("#to", "Enter")
    visit.until(f"{ranges}.every(([a, b]) => a === 9.5 && b === 15.5)")
    visit.page.click("#all-steps")
    visit.until(f"{ranges}.every(([a, b]) => a === -0.5 && b === {STEPS - 0.5})")


def test_courses_and_events_stand_above_on_the_same_axis(visit: Visit) -> None:
    traces = visit.page.evaluate("COURSE.data.map(({name, x, y}) => ({name, x, y}))")
    loss, lr, skips = traces
    assert (loss["name"], lr["name"]) == ("loss", "lr")
    assert loss["y"][:3] == pytest.approx([5.0, 2.5, 5 / 3])
    assert loss["y"][FAILING:] == [None] * (STEPS - FAILING)
    assert skips["x"] == [7]
    strips = visit.page.evaluate(
        "COURSE.layout.shapes.filter((shape) => shape.type === 'rect').map(({x0, x1}) => [x0, x1])"
    )
    assert strips == [[FAILING - 0.5, STEPS - 0.5]]


def test_the_filter_filters_and_columns_sort(visit: Visit) -> None:
    shown = visit.page.locator("#table tbody tr:visible td:first-child")
    assert shown.all_inner_texts() == ["(root) Net", *NAMES[1:]]
    visit.page.fill("#filter", "LINEAR")
    assert shown.all_inner_texts() == ["body.0.linear", "body.1.linear", "head"]  # the last one by its type
    assert visit.page.locator("#filter-count").inner_text() == "3 of 7 modules"
    visit.page.fill("#filter", "")
    visit.page.click("#table th button:text-is('max |output|')")
    assert shown.all_inner_texts()[:2] == ["head", "body.1.linear"]
    assert visit.page.locator("#table th[aria-sort=descending]").inner_text() == "max |output|"


def test_a_healthy_run_says_so(browser: Browser, tmp_path: Path) -> None:
    visit = Visit(browser, write_page(tmp_path, failing=None))
    assert visit.page.locator("#verdict").inner_text().startswith("No NaN or Inf that matters in 40 steps of 7 modules")
    assert visit.page.locator("ol.path").count() == 0
    assert visit.page.locator("#no-lines").is_visible()
    visit.close()


def test_a_run_without_a_record_is_a_page_too(browser: Browser, tmp_path: Path) -> None:
    path = write_run(tmp_path / "run.parquet", [], modules=MODULES)
    with open_run(path) as run:
        visit = Visit(browser, run.report(tmp_path / "run.html"))
    assert visit.page.locator(".headline").inner_text() == "The run holds no records, so nothing can be said of it."
    assert visit.page.locator("#table tbody tr").count() == len(MODULES)
    assert not visit.page.locator("#charts").is_visible()
    visit.close()


def test_a_run_that_was_only_watched_shows_its_course(browser: Browser, tmp_path: Path) -> None:
    rows = [
        Record(step, step, "loss", "loss", min=1.0 + step, max=1.0 + step, norm=1.0 + step, nan_count=0, numel=1)
        for step in range(5)
    ]
    with open_run(write_run(tmp_path / "run.parquet", rows)) as run:
        visit = Visit(browser, run.report(tmp_path / "run.html"))
    assert visit.page.evaluate("COURSE.data[0].y") == [1, 2, 3, 4, 5]
    assert visit.page.locator("#course").is_visible() and not visit.page.locator("#tensor").is_visible()
    visit.page.fill("#to", "2")
    visit.page.press("#to", "Enter")
    visit.until("COURSE.layout.xaxis.range[1] === 2.5")
    visit.close()


def test_hostile_names_are_shown_as_they_are_and_do_nothing(browser: Browser, tmp_path: Path) -> None:
    names = ("", "first", "second", HOSTILE[0], *HOSTILE[1:])
    visit = Visit(browser, write_page(tmp_path, names=names))
    page = visit.page
    assert page.locator("#table tbody tr td:first-child").all_text_contents() == ["(root)", *names[1:]]
    assert HOSTILE[0] in page.locator(".headline").text_content()
    page.select_option("#tensor", "output")
    for name in HOSTILE:
        assert name.split("\n")[0] in visit.point_at_cell(name, 3)
        visit.click_cell(name, 3)
    visit.until("LINES.data.length === 12")
    chips = page.locator("#chosen button").all_text_contents()
    assert {chip.removesuffix(f" {CROSS}") for chip in chips} == set(HOSTILE)
    labels = page.locator("#heatmap .ytick text").all_text_contents()
    assert "".join(labels).count("<b>bold") + "".join(labels).count("<a href") >= 1
    assert page.locator("#heatmap a, #table img, #verdict img").count() == 0
    assert page.evaluate("window.broken") is None
    visit.close()


def test_a_recording_that_is_hostile_throughout_is_a_page_that_does_nothing(browser: Browser, tmp_path: Path) -> None:
    with open_run(write_hostile_run(tmp_path / "run.parquet")) as run:
        visit = Visit(browser, run.report(tmp_path / "run.html", title=ALL))
        cells = f"{run.first_nan()._repr_html_()}{run.summary()._repr_html_()}{run.sql('from modules')._repr_html_()}"
    page = visit.page
    dialogs: list[str] = []
    page.on("dialog", lambda dialog: dialogs.append(dialog.message))
    in_table = page.locator("#table tbody tr td:first-child").all_text_contents()
    assert (in_table[0], sorted(in_table[1:])) == (f"(root) {ALL}", sorted(HOSTILE_NAMES))
    for place in ("title", "h1", ".headline"):
        assert printable(ALL) in (page.locator(place).first.text_content() or "")
    assert page.locator("#verdict img, #verdict script, #verdict a, #heatmap a, #table img").count() == 0
    for name in HOSTILE_NAMES:
        if len(name) < 5_000:
            page.evaluate("(module) => chooseModule(module)", HOSTILE_NAMES.index(name) + 1)
    assert page.evaluate("window.broken") is None
    assert dialogs == []
    visit.close()
    # A notebook has no policy that would stop a script, and is asked to run none.
    notebook = browser.new_context().new_page()
    notebook.set_content(f"<!DOCTYPE html><body>{cells}</body>")
    assert notebook.locator("img, script, a").count() == 0
    assert notebook.evaluate("window.broken") is None
    shown = notebook.locator("table").last.locator("tbody tr td:first-child").all_text_contents()
    assert shown == ["", *(name.replace("\0", "\\x00") for name in HOSTILE_NAMES)]
    notebook.context.close()


def test_a_page_of_as_many_modules_as_it_takes_opens(browser: Browser, tmp_path: Path) -> None:
    names = ("", *(f"experts.{number}" for number in range(2 * MOST_MODULES)))
    counts = {"numel": 4, "posinf_count": 0, "neginf_count": 0, "min": -1.0, "max": 1.0, "norm": 2.0}
    rows = [
        Record(0, seq, "forward", "output", name, "0", nan_count=int(seq > MOST_MODULES), **counts)  # type: ignore[arg-type]
        for seq, name in enumerate(names)
    ]
    modules = [ModuleInfo(name, "Linear", root=not name, depth=2 if name else 0, calls=1) for name in names]
    with open_run(write_run(tmp_path / "run.parquet", rows, modules=modules)) as run:
        page_of = run.report(tmp_path / "run.html")
    started = time.monotonic()
    visit = Visit(browser, page_of)
    assert time.monotonic() - started < 60
    assert visit.page.locator("#table tbody tr").count() == MOST_MODULES
    notes = visit.page.locator(".note").all_inner_texts()
    assert any(
        note.startswith(f"{len(names):,} modules are too many for a page: {MOST_MODULES:,} are shown") for note in notes
    )
    visit.close()


def relative_luminance(color: str) -> float:
    """Relative luminance of "rgb(r, g, b)", as WCAG 2 defines it."""
    channels = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    lighter, darker = sorted((relative_luminance(one), relative_luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


COLOURS = """() => {
    const ground = (element) => {
        for (; element; element = element.parentElement) {
            const color = getComputedStyle(element).backgroundColor;
            if (color !== "rgba(0, 0, 0, 0)" && color !== "transparent") return color;
        }
        return "none";
    };
    const tags = "h1, h2, h3, p, dt, dd, span, li, td, th, label, select, input, button, summary";
    const texts = [...document.querySelectorAll(tags)]
        .filter((element) => element.checkVisibility() && element.textContent.trim())
        .map((element) => [element.className || element.tagName, getComputedStyle(element).color, ground(element)]);
    const drawn = [...document.querySelectorAll(".chart text")].map((element) =>
        ["chart text", getComputedStyle(element).fill, getComputedStyle(document.body).backgroundColor]);
    return [...texts, ...drawn];
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_ground_in_both_themes(browser: Browser, failing_page: Path, scheme: str) -> None:
    visit = Visit(browser, failing_page, color_scheme=scheme)
    grounds = relative_luminance(visit.page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert grounds > 0.9 if scheme == "light" else grounds < 0.02
    found = visit.page.evaluate(COLOURS)
    assert len(found) > 100
    weak = {(what, text, ground) for what, text, ground in found if contrast(text, ground) < 4.5}
    assert weak == set()
    visit.close()


def test_charts_follow_when_the_theme_changes(visit: Visit) -> None:
    before = visit.page.evaluate("COURSE.layout.paper_bgcolor")
    visit.page.emulate_media(color_scheme="dark")
    visit.until(f"CHARTS.every((chart) => chart.layout.paper_bgcolor !== '{before}')")


def test_a_narrow_screen_needs_no_sideways_scrolling(browser: Browser, failing_page: Path) -> None:
    visit = Visit(browser, failing_page)
    visit.page.set_viewport_size({"width": 390, "height": 800})
    visit.until("COURSE._fullLayout.width < 390")
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= 390
    visit.close()


def test_a_long_run_says_that_it_is_thinned_and_still_shows_a_single_nan_on_a_narrow_screen(
    browser: Browser, tmp_path: Path
) -> None:
    rows = [
        Record(step, step, "forward", "output", "", "0", numel=4, nan_count=int(step == 4_321),
               posinf_count=0, neginf_count=0, min=-1.0, max=1.0, norm=2.0)
        for step in range(6_000)
    ]  # fmt: skip
    path = write_run(tmp_path / "run.parquet", rows, modules=MODULES[:1])
    with open_run(path) as run:
        visit = Visit(browser, run.report(tmp_path / "run.html"))
    notes = visit.page.locator(".note").all_inner_texts()
    assert notes == ["6,000 steps drawn as 600 columns of 10: the extremes of each and every NaN and Inf are kept"]
    visit.page.set_viewport_size({"width": 390, "height": 800})
    visit.until("heatmapGroup > 1")
    [row] = visit.page.evaluate("HEATMAP.data[0].z")
    group = visit.page.evaluate("heatmapGroup")
    assert [column for column, value in enumerate(row) if value == 1] == [432 // group]
    assert visit.page.evaluate("HEATMAP._fullLayout.xaxis._length") >= len(row)  # each is a pixel wide at least
    visit.close()
