"""The live page and the report, in a real browser."""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
from commands import get, watching
from playwright.sync_api import Browser, Page, expect, sync_playwright
from waiting import HANG, until
from written import LAYERS, SHAPES, Written, model

from distcockpit import open_run
from distcockpit import quantities as q
from distcockpit.cli import main
from distcockpit.view.page.content import content
from distcockpit.view.page.server import Live

CHROMIUM = next((path for name in ("chromium", "google-chrome", "chrome") if (path := shutil.which(name))), None)

PATIENCE = HANG / 5 * 1000
"""Milliseconds; a page that does not show something by then never will, and there are many of these waits."""

QUIET = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
QUIET += ["--disable-component-update", "--disable-sync"]

QUANTITIES = [
    q.Alpha(),
    q.GradNorm(),
    q.NormTest(),
    q.GradHist1d(bins=8),
    q.GradHist2d(bins=(4, 5), keep_individual=True),
    q.RankDisagreement(),
    q.RankHealth(),
    q.OutputGradientGeometry(),
    q.HessMaxEV(),
    q.Loss(),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        assert not os.environ.get("CI"), "CI must have a browser: .ci/run installs chromium"
        pytest.skip("no chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET, timeout=PATIENCE)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page on which nothing may go wrong, and which may reach nothing but 127.0.0.1."""
    context = browser.new_context(viewport={"width": 1400, "height": 900})
    context.set_default_timeout(PATIENCE)
    expect.set_options(PATIENCE)
    page = context.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("dialog", lambda dialog: (wrong.append(f"dialog {dialog.message}"), dialog.dismiss()))
    near = re.compile(r"(file://|data:|blob:|http://127\.0\.0\.1:)")
    page.on("request", lambda r: None if near.match(r.url) else wrong.append(r.url))
    yield page
    context.close()
    allowed = (
        "503",
        "ERR_CONNECTION_REFUSED",
        "ERR_CONNECTION_RESET",
        "ERR_EMPTY_RESPONSE",
    )  # the server went away, in the tests of that
    assert [text for text in wrong if not any(word in text for word in allowed)] == []


def report(store: Path, to: Path) -> str:
    with pytest.raises(SystemExit) as done:
        main(["report", str(store), "-o", str(to)])
    assert done.value.code == 0
    return f"file://{to}"


def opened(page: Page, address: str) -> None:
    page.goto(address)
    page.wait_for_selector("html[data-ready=yes]")


def until_true(page: Page, condition: str) -> None:
    """Wait for something in the page; Playwright's own way evaluates texts there, which the page forbids."""
    until(lambda: page.evaluate(condition), condition)


def traces(page: Page, picture: str) -> list[dict[str, Any]]:
    """What Plotly has drawn: names, visibility and data, decoded."""
    page.locator(f"#{picture}").scroll_into_view_if_needed()
    until_true(page, f"document.querySelector('#{picture} .plot').data !== undefined")
    parts = "name: t.name, visible: t.visible, type: t.type, x: Array.from(t.x || []), y: Array.from(t.y || [])"
    cells = "z: t.z ? Array.from(t.z, row => Array.from(row)) : null"
    return page.evaluate(f"document.querySelector('#{picture} .plot')._fullData.map(t => ({{{parts}, {cells}}}))")


def rows(written: Written, n: int, **more: Any) -> Written:
    random = np.random.default_rng(written.step)
    values = {
        "alpha": {"alpha": random.normal(0, 0.5, n)},
        "grad_norm": {"grad_norm": np.tile(10.0 ** np.repeat([-6, -3, 0], 2), (n, 1))},
        "grad_hist_1d": {"counts": random.integers(0, 500, (n, 8)), "edges": np.tile(np.linspace(-1, 1, 9), (n, 1))},
        "grad_hist_2d": {
            "counts": random.integers(0, 500, (n, 4, 5)),
            "grad_edges": np.tile(np.linspace(-1, 1, 5), (n, 1)),
            "param_edges": np.tile(np.linspace(-2, 2, 6), (n, 1)),
        },
        "hess_max_ev": {"hess_max_ev": random.normal(0, 100, n)},
        **more,
    }
    return written.rows(n, **values)


def test_a_report_opens_offline_and_says_what_looks_wrong(page: Page, tmp_path: Path) -> None:
    store = rows(Written(tmp_path / "run.zarr", QUANTITIES), 40).close()
    opened(page, report(store, tmp_path / "report.html"))
    run = open_run(store)
    expect(page.locator("#title")).to_have_text("run")
    expect(page.locator("#runs")).to_contain_text("closed")
    finding = page.locator("#findings li.wrong", has_text="gradients vanish towards the input")
    expect(finding).to_contain_text("hardly learns compared to")
    expect(finding.locator("small a")).to_have_attribute("href", "https://proceedings.mlr.press/v9/glorot10a.html")
    assert finding.bounding_box()["y"] < 900  # type: ignore[index] # on the first screen
    finding.get_by_text("see the figure").click()
    assert page.evaluate("location.hash") == "#grad_norm"
    expect(page.locator("#grad_norm")).to_be_in_viewport()
    faint = "[...document.querySelector('#grad_norm .plot').data].filter(t => t.opacity < 1).map(t => t.meta.member)"
    until(lambda: page.evaluate(faint) == ["0.bias", "2.weight", "2.bias", "4.bias"], "what the finding is about")
    page.locator("#grad_norm").get_by_text("show all layers").click()
    until(lambda: page.evaluate(faint) == [], "all layers")
    (line,) = [t for t in traces(page, "alpha") if t["name"] == "each row"]
    np.testing.assert_array_equal(line["x"], run["alpha"]["step"])
    np.testing.assert_allclose(np.sinh(line["y"]), run["alpha"]["alpha"], rtol=1e-12)
    (cells,) = [t for t in traces(page, "grad_hist_1d") if t["type"] == "heatmap"]
    counts = run["grad_hist_1d"]["counts"].values.T
    found = np.array([[np.nan if v is None else v for v in row] for row in cells["z"]], dtype=float)
    np.testing.assert_allclose(10 ** found[counts > 0], counts[counts > 0], rtol=1e-5)
    assert np.isnan(found[counts == 0]).all()


def test_dark_mode(browser: Browser, tmp_path: Path) -> None:
    """Whoever reads at night gets a dark page, and curves that are black on paper are light there."""
    store = rows(Written(tmp_path / "run.zarr", QUANTITIES), 40).close()
    address, seen = report(store, tmp_path / "report.html"), {}
    for scheme in ("light", "dark"):
        context = browser.new_context(color_scheme=scheme)  # type: ignore[arg-type] # Playwright names them as literals
        page = context.new_page()
        opened(page, address)
        traces(page, "alpha")
        median = "document.querySelector('#alpha .plot').data.find(t => t.name.startsWith('rolling')).line.color"
        seen[scheme] = (page.evaluate("getComputedStyle(document.body).backgroundColor"), page.evaluate(median))
        context.close()
    assert seen == {"light": ("rgb(255, 255, 255)", "#1a1a1a"), "dark": ("rgb(22, 24, 28)", "#e6e6e6")}


def test_a_finding_about_a_rank_leads_to_the_plot_that_shows_it(page: Page, tmp_path: Path) -> None:
    written = Written(tmp_path / "run.zarr", QUANTITIES)
    store = rows(written, 40, rank_disagreement={"loss": np.tile([1.0, 9.0, 1.0, 1.0], (40, 1))}).close()
    opened(page, report(store, tmp_path / "report.html"))
    page.locator("#findings li", has_text="rank 1 differs").get_by_text("see the figure").click()
    expect(page.locator("#ranks h3")).to_have_text("loss of each rank")
    expect(page.locator("#ranks")).to_be_in_viewport()


def test_zoom_hover_and_pages(page: Page, tmp_path: Path) -> None:
    store = rows(Written(tmp_path / "run.zarr", QUANTITIES), 40).close()
    opened(page, report(store, tmp_path / "report.html"))
    traces(page, "norm_test" if page.locator("#norm_test").count() else "gradient_tests")
    plot = page.locator("#gradient_tests .plot")
    box = plot.locator(".nsewdrag").first.bounding_box()
    assert box is not None
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + box["width"] / 4, y, steps=6)
    page.mouse.up()
    ends = "document.querySelector('#gradient_tests .plot').layout.xaxis.range"
    until_true(page, f"(r => r[0] > 10 && r[1] < 35)({ends})")
    value = float(open_run(store)["norm_test"]["norm_test"].values[25])
    page.evaluate(
        "Plotly.Fx.hover(document.querySelector('#gradient_tests .plot'), [{curveNumber: 0, pointNumber: 25}])"
    )
    expect(plot.locator(".hoverlayer")).to_contain_text(f"{value:.5g}")
    select = page.locator("#grad_hist_2d_parameters-grad_hist_2d select")
    select.scroll_into_view_if_needed()
    select.select_option(label="2.weight")
    expect(page.locator("#grad_hist_2d_parameters-grad_hist_2d h3")).to_contain_text("2.weight")
    (cells,) = [t for t in traces(page, "grad_hist_2d_parameters-grad_hist_2d") if t["type"] == "heatmap"]
    assert len(cells["z"]) == 4 and len(cells["z"][0]) == 5


def test_layers_are_picked(page: Page, tmp_path: Path) -> None:
    store = rows(Written(tmp_path / "run.zarr", QUANTITIES), 40).close()
    opened(page, report(store, tmp_path / "report.html"))
    page.locator("#picker summary").click()
    expect(page.locator("#members label")).to_have_count(6 + 3)  # parameters, layers
    page.locator("#filter").fill("*.bias")

    def visible() -> set[str]:
        return {t["name"] for t in traces(page, "grad_norm") if t["visible"] is True}

    until(lambda: visible() == {"0.bias", "2.bias", "4.bias", "all"}, "biases alone")
    expect(page.locator("#picked")).to_have_text("(3 of 9)")
    page.locator("#members label", has_text="2.bias").locator("input").uncheck()
    until(lambda: visible() == {"0.bias", "4.bias", "all"}, "two biases")
    page.locator("#all").click()
    until(lambda: len(visible()) == 7, "all")
    page.locator("#none").click()
    until(lambda: visible() == {"all"}, "none")


HOSTILE = [
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(2)</script>",
    "<a href='javascript:alert(3)'>a</a>",
    "&lt;b&gt;",
    "\"'`${alert(4)}",
    "$\\frac{",
    "\x1b[31mred",
    "<svg/onload=alert(5)>",
    "a\u2028b",
    "{{7*7}}",
]


def test_hostile_names_are_text(page: Page, tmp_path: Path) -> None:
    """Every parameter and layer has another name that somebody might try."""
    numbers = {name: k for k, name in enumerate([*SHAPES, *LAYERS])}
    facts = model(lambda name: f"{HOSTILE[numbers[name] % len(HOSTILE)]}{name}")
    first, last = HOSTILE[0], HOSTILE[-1]
    written = Written(tmp_path / "run.zarr", QUANTITIES, facts, versions={"torch": first}, config={"a": first})
    store = rows(written, 40).close()
    written.say("hess_max_ev", quantity=first, description=first)  # a class that nobody knows
    written.say("hess_max_ev/hess_max_ev", long_name=first, units=last)
    written.say("norm_test/norm_test", long_name=last, units=first)
    target = store.rename(tmp_path / (first.replace("/", "") + ".zarr"))
    opened(page, report(target, tmp_path / "report.html"))
    for picture in ("grad_norm", "output_gradients-output_gradient_geometry", "grad_hist_2d_parameters-grad_hist_2d"):
        traces(page, picture)
    traces(page, "more-hess_max_ev")
    page.locator("#picker summary").click()
    clean = ["".join(c if c.isprintable() else "\ufffd" for c in name) for name in facts.parameters]
    assert [text.strip() for text in page.locator("#members label").all_text_contents()][:6] == clean
    legend = [text.replace("\xa0", " ") for text in page.locator("#grad_norm .legendtext").all_text_contents()]
    assert legend[:6] == clean
    dangerous = "document.querySelectorAll('img, iframe, object, embed, main script, header script').length"
    assert page.evaluate(dangerous) == 0
    links = page.evaluate("[...document.querySelectorAll('a')].map(a => a.getAttribute('href') || '#')")
    assert all(link.startswith(("#", "https://")) for link in links) and len(links) > 5
    page.wait_for_timeout(100)


def files(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(p.relative_to(folder)): (p.stat().st_mtime_ns, p.stat().st_size) for p in folder.rglob("*")}


def test_the_live_page_grows_with_the_run(page: Page, tmp_path: Path) -> None:
    written = rows(Written(tmp_path / "run.zarr", QUANTITIES), 30)
    with watching(str(written.path)) as (address, _):
        opened(page, address)
        points = lambda: next(len(t["x"]) for t in traces(page, "alpha") if t["name"] == "each row")  # noqa: E731
        assert points() == 30
        expect(page.locator("#findings li")).to_have_count(1)
        page.evaluate("Plotly.relayout(document.querySelector('#alpha .plot'), {'xaxis.range': [5, 20]})")
        page.locator("#picker summary").click()
        page.locator("#filter").fill("0.")
        before = files(written.path)
        page.wait_for_timeout(1000)
        assert files(written.path) == before  # nothing is written into the run
        rows(written, 20, rank_disagreement={"loss": np.tile([1.0, 9.0, 1.0, 1.0], (20, 1))})
        shown = "document.querySelector('#alpha .plot')._fullData.find(t => t.name === 'each row')"
        until_true(page, f"{shown}._length === 50")
        assert page.evaluate("document.querySelector('#alpha .plot').layout.xaxis.range") == [5, 20]  # the zoom stays
        assert page.locator("#filter").input_value() == "0."
        expect(page.locator("#live")).to_contain_text("live")
        assert {t["name"] for t in traces(page, "grad_norm") if t["visible"] is True} == {"0.weight", "0.bias", "all"}
        shutil.move(written.path, tmp_path / "away")
        expect(page.locator("#live.lost")).to_contain_text("there is no run here")
        shutil.move(tmp_path / "away", written.path)
        expect(page.locator("#live.lost")).to_have_count(0)
        written.close()
        expect(page.locator("#runs")).to_contain_text("closed")
    expect(page.locator("#live.lost")).to_contain_text("has ended")


def test_a_run_without_rows_is_waited_for(page: Page, tmp_path: Path) -> None:
    written = Written(tmp_path / "run.zarr", QUANTITIES)
    with watching(str(written.path)) as (address, _):
        opened(page, address)
        expect(page.locator("#findings")).to_contain_text("No step was tracked yet.")
        rows(written, 12)
        expect(page.locator(".picture h3", has_text="effective step size")).to_be_visible()
        expect(page.locator("#findings")).not_to_contain_text("No step was tracked yet.")
    written.close()


def test_the_server_is_for_this_machine_alone(tmp_path: Path) -> None:
    store = rows(Written(tmp_path / "run.zarr", QUANTITIES), 12).close()
    with watching(str(store)) as (address, process):
        status, text = get(address)
        assert status == 200 and "Content-Security-Policy" in text
        token = re.search(r'"token": "([^"]+)"', text)
        assert token and get(address, f"/data?have={token.group(1)}")[0] == 204
        assert get(address, "/data?have=other")[0] == 200
        assert get(address, host="evil.example:80")[0] == 400  # a name of somebody else's that points here
        assert get(address, "/../../etc/passwd")[0] == 404
        port = int(address.rsplit(":", 1)[1].rstrip("/"))
        others = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)} - {"127.0.0.1"}
        for other in [*others, "127.0.0.2"]:
            with pytest.raises(OSError), socket.create_connection((other, port), timeout=2):
                pass
        process.send_signal(signal.SIGINT)
        assert process.wait(HANG) in (0, 130, -2)
        assert process.stderr is not None and "Traceback" not in process.stderr.read()


def test_a_port_that_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = rows(Written(tmp_path / "run.zarr", QUANTITIES), 12).close()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit) as done:
            main(["watch", str(store), "--port", str(port)])
    assert done.value.code == 2 and f"port={port}: cannot be used" in capsys.readouterr().err


def test_comparison(page: Page, tmp_path: Path) -> None:
    for k, name in enumerate(("one", "two")):
        rows(Written(tmp_path / f"{name}.zarr", QUANTITIES), 20 + k, loss={"loss": 1.0 + k}).close()
    target = tmp_path / "both.html"
    with pytest.raises(SystemExit) as done:
        main(["compare", str(tmp_path / "one.zarr"), str(tmp_path / "two.zarr"), "-o", str(target)])
    assert done.value.code == 0
    opened(page, f"file://{target}")
    expect(page.locator("#title")).to_have_text("one and two")
    found = {t["name"]: t["y"] for t in traces(page, "losses")}
    assert set(found["one"]) == {1.0} and set(found["two"]) == {2.0} and len(found["two"]) == 21
    expect(page.locator("#findings li").first).to_contain_text("one: ")


def walk(node: Any, see: Callable[[Any], None]) -> None:
    see(node)
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        walk(child, see)


@pytest.mark.smoke
def test_every_figure_is_one_that_plotly_knows(tmp_path: Path) -> None:
    run = open_run(rows(Written(tmp_path / "run.zarr", QUANTITIES), 30).close())
    made = content({"run": run})
    pictures = [p for section in made["sections"] for p in section["pictures"]]
    assert len(pictures) >= 10
    for picture in pictures:
        for one in picture["pages"]:
            go.Figure(data=one["data"], layout=one["layout"])  # refuses names and values that Plotly does not have


def test_axes_show_the_data_and_not_more(tmp_path: Path) -> None:
    alpha = np.array([-0.5, 0.25, 2.0, -1.0] * 5)
    run = open_run(
        Written(tmp_path / "run", [q.Alpha(), q.EarlyStopping(), q.NormTest()])
        .rows(20, alpha={"alpha": alpha}, early_stopping={"early_stopping": np.geomspace(0.01, 1, 20)})
        .close()
    )
    made = {p["id"]: p["pages"][0]["layout"] for s in content({"run": run})["sections"] for p in s["pictures"]}
    low, high = np.sinh(made["alpha"]["yaxis"]["range"])
    assert -1.3 < low < -1 and 2 < high < 2.6
    too_far, short = made["alpha"]["shapes"][:2]
    assert too_far["y0"] == 0 and too_far["y1"] > high and short["y1"] == 0 and short["y0"] < np.arcsinh(low)
    low, high = made["early_stopping"]["yaxis"]["range"]
    (noise,) = [shape for shape in made["early_stopping"]["shapes"] if shape["type"] == "rect"]
    assert noise["y0"] == 0 and low == 0 < high  # nothing is below 0, so the axis ends there
    assert made["gradient_tests"]["yaxis"]["type"] in ("linear", "log")


def test_a_page_is_not_built_all_the_time(tmp_path: Path) -> None:
    """A run that commits more often than its page can be built: whoever asks waits, with what there is."""
    store = Written(tmp_path / "run.zarr", [q.Loss()]).rows(20).close()
    opened: list[int] = []

    def runs() -> dict[str, Any]:
        opened.append(len(opened))
        return {"run": open_run(store)}

    commits = iter("abcdef")
    live = Live(lambda: next(commits), runs, refresh_seconds=1)
    made = live.newest()
    assert made is not None and made["token"] == "a" and live.rests_until > 0
    live.rests_until = math.inf
    assert live.newest(have="a") is None and live.newest() is made and opened == [0]
    live.rests_until = 0.0
    newer = live.newest(have="a")
    assert newer is not None and newer["token"] == "d" and opened == [0, 1]


def test_a_page_of_a_long_run_stays_small(tmp_path: Path) -> None:
    written = Written(tmp_path / "run.zarr", [q.Loss(), q.GradNorm(), q.GradHist1d(bins=8), q.RankDisagreement()])
    store = written.rows(20_000).close()
    report(store, tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size < 8e6
