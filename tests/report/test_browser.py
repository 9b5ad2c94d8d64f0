"""The HTML report in a real browser, from disk: scripts, filters, keyboard, phone width, policy, hostile texts.

Needs Debian's chromium and chromium-driver and the dependency group ``browser``: ``nox -s browser``.
"""

from __future__ import annotations

import http.server
import json
import shutil
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from process_harness import script
from test_html import BASELINES, HOSTILE, case, journal, of_a_check

from accelcheck.core.case import Evidence, Figure, Measurement, Verdict
from accelcheck.core.journal import Record
from accelcheck.report.html import document, experiments
from accelcheck.report.run import load, measurement

if TYPE_CHECKING:
    from accelcheck.report.run import DeviceRun

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: dependency group browser")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.skipif(
        CHROMIUM is None or DRIVER is None, reason="no chromium: apt-get install chromium chromium-driver"
    ),
    pytest.mark.xdist_group("browser"),  # one browser serves them all
]
ROOT = Path(__file__).parents[2]
CASES = 20_000
PATIENT = 60.0
"""Seconds that a page may take on a busy machine."""
STAMP = "return document.documentElement.dataset.ready"


class Browser:
    """A headless chromium."""

    def __init__(self) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for word in ("--headless=new", "--hide-scrollbars", "--no-sandbox", "--disable-dev-shm-usage"):
            options.add_argument(word)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))

    def open(self, path: Path, hash_: str = "", *, width: int = 1280, dark: bool = False, ready: bool = True) -> None:
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.driver.get("about:blank")
        self.driver.get_log("browser")
        self.driver.get(f"{path.as_uri()}{hash_}")
        if ready:
            self.until(STAMP)

    def run(self, script: str, *values: Any) -> Any:
        return self.driver.execute_script(script, *values)

    def until(self, script: str) -> Any:
        from selenium.webdriver.support.wait import WebDriverWait

        return WebDriverWait(self.driver, PATIENT, 0.05).until(lambda _: self.run(script))

    def press(self, *keys: str) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def said(self) -> list[str]:
        """Messages of the browser's console."""
        return [line["message"] for line in self.driver.get_log("browser")]

    def see_everything(self) -> None:
        """Open all that is folded, and scroll through the page, so that every plot is drawn."""
        self.run("for (const one of document.querySelectorAll('details')) one.open = true;")
        self.run("for (const one of document.querySelectorAll('main:not([hidden]) .plot')) one.scrollIntoView();")
        self.until(
            "return [...document.querySelectorAll('main:not([hidden]) .plot')].every((one) => { one.scrollIntoView(); "
            "return one.firstChild; })"
        )

    def set(self, name: str, value: str) -> str:
        """Set a filter; what is said of the matches."""
        self.run(
            "const box = document.querySelector(`#filters [name=${arguments[0]}]`); box.value = arguments[1];"
            "document.getElementById('matches').textContent = '';"
            "box.dispatchEvent(new Event(box.tagName === 'SELECT' ? 'change' : 'input', { bubbles: true }));",
            name, value,
        )  # fmt: skip
        return str(self.until("return document.getElementById('matches').textContent"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    started = Browser()
    yield started
    started.driver.quit()


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of stored journals with all that a report can have."""
    path = tmp_path_factory.mktemp("stored") / "report.html"
    failing = journal(
        path.with_name("a.jsonl"),
        [
            Record(
                case("compile-static"), Verdict.FAIL,
                reason="out: view row at [3, :]: expected at most 1.0e-7, got 2.0e-6", compared=40,
                figures=(Figure("out", "row", 2e-6, 1e-7, "[3, :]", gates=True),
                    Figure("out", "gain", 0.0, 1e-7, "", gates=True)),
                evidence=(Evidence("graphs >= 1", 1, engaged=True),), seconds={"run": 0.1},
            ),
            Record(case("export", "a-workload-with-a-name-that-is-as-long-as-any-that-a-vendor-may-think-of"),
                Verdict.ERROR, reason="LookupError: " + "no-such-layer" * 40),
        ],
        "cpu",
    )  # fmt: skip
    names = ("cpu/level1-speed.jsonl", "xla/level1.jsonl", "xla/level1-speed.jsonl")
    runs = load([failing, *(BASELINES / name for name in names)])
    curves = [experiments.curve(BASELINES / name / "curve.json") for name in ("cpu", "xla")]
    document.write(path, runs, curves, [experiments.claims(BASELINES / "cpu" / "claims.json")])
    return path


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Sequence[DeviceRun]]:
    """A report of 20,000 cases."""
    folder = tmp_path_factory.mktemp("many")
    module = script(ROOT / "benchmarks" / "report_speed.py")
    runs = load(module.journals(folder, CASES))
    document.write(folder / "report.html", runs)
    return folder / "report.html", runs


@pytest.mark.parametrize("dark", [False, True])
def test_no_part_of_a_report_makes_a_script_error(browser: Browser, stored: Path, *, dark: bool) -> None:
    browser.open(stored, dark=dark)
    browser.see_everything()
    assert browser.run("return document.querySelectorAll('#overview canvas').length") == 4
    assert browser.said() == []
    for name in (
        "amp-bf16/speed-mlp/cpu/float32/speed",
        "compile-static/mlp/cpu/float32/forward",
        "eager/mlp/xla/float32/backward",
    ):
        browser.open(stored, f"#case={name}", dark=dark)
        browser.see_everything()
        assert name in browser.run("return document.getElementById('page').textContent")
        assert browser.run("return document.querySelectorAll('#page canvas').length") >= 1
        assert browser.said() == []


def test_a_plot_has_the_colours_of_the_scheme_also_when_it_changes(browser: Browser, stored: Path) -> None:
    colours = """
      const canvas = document.querySelector("#speed canvas");
      const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
      const found = new Set();
      for (let at = 0; at < data.length; at += 4)
        if (data[at + 3] > 200) found.add(`${data[at]},${data[at + 1]},${data[at + 2]}`);
      return [...found];"""
    browser.open(stored, "#speed")
    browser.until("return document.querySelector('#speed canvas')")
    light = set(browser.run(colours))
    scheme = {"name": "prefers-color-scheme", "value": "dark"}
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})  # while it is shown
    browser.until("return getComputedStyle(document.body).backgroundColor === 'rgb(20, 23, 28)'")
    night = set(browser.run(colours))
    assert "10,98,181" in light  # --series-0
    assert "108,178,255" in night
    assert "10,98,181" not in night


def test_the_page_of_a_case_says_all_that_its_record_has(browser: Browser, stored: Path) -> None:
    browser.open(stored, "#case=compile-static/mlp/cpu/float32/forward")
    text = browser.run("return document.getElementById('page').innerText")
    for part in ("fail", "40 elements", "expected at most 1.0e-7, got 2.0e-6", "1 view beyond the budget", "20x",
        "[3, :]", "graphs >= 1",
                 "--accel-case=compile-static/mlp/cpu/float32/forward"):  # fmt: skip
        assert part in text
    assert browser.run("return document.activeElement.id") == "page"
    assert browser.run("return document.getElementById('overview').hidden")
    browser.run("document.querySelector('#page a[href=\"#cases\"]').click()")
    browser.until("return document.getElementById('page').hidden && !document.getElementById('overview').hidden")
    browser.open(stored, "#case=no/such/case")
    assert "The journals have no case no/such/case" in browser.run("return document.getElementById('page').textContent")


def test_filters_find_the_cases_among_20000(browser: Browser, many: tuple[Path, Sequence[DeviceRun]]) -> None:
    path, runs = many
    records = [record for run in runs for record in run.records]
    assert len(records) == CASES
    browser.open(path)
    assert browser.run("return document.getElementById('matches').textContent") == "20,000 cases."
    assert browser.run("return document.querySelectorAll('#list tbody tr').length") == 100
    assert browser.run("return document.querySelectorAll('*').length") < CASES

    def said(number: int) -> str:
        return f"{number:,} of 20,000 cases."

    failing = [record for record in records if not record.verdict.green]
    assert browser.set("verdict", "against") == said(len(failing))
    assert browser.set("run", "1") == said(sum(record.case.device == "cuda" for record in failing))
    browser.set("run", "")
    browser.set("verdict", "")
    assert browser.set("dtype", "bfloat16") == said(sum(record.case.dtype == "bfloat16" for record in records))
    half = [record for record in records if record.case.dtype == "bfloat16" and record.case.mode == "train-speed"]
    assert browser.set("mode", "train-speed") == said(len(half))
    browser.set("dtype", "")
    browser.set("mode", "")
    assert browser.set("family", "sdpa") == said(sum(record.case.technique.startswith("sdpa-") for record in records))
    browser.set("family", "")
    assert browser.set("workload", "mlp-2") == said(sum(record.case.workload == "mlp-2" for record in records))
    browser.set("workload", "")
    wanted = [record for record in records if "compile" in record.case.id and "/rocm/" in record.case.id]
    assert browser.set("text", "/rocm/ COMPILE") == said(len(wanted))
    shown = browser.run(
        "return [...document.querySelectorAll('#grid tbody tr:not([hidden])')].map((row) => "
        "[row.cells[0].textContent, row.cells[3].innerText.trim().split(/\\s+/)[1]])"
    )
    techniques = Counter(record.case.technique for record in wanted)
    assert {name for name, _ in shown} == set(techniques)
    assert browser.said() == []


def test_the_list_turns_its_pages_and_sorts(browser: Browser, many: tuple[Path, Sequence[DeviceRun]]) -> None:
    path, runs = many
    browser.open(path, "#cases=&verdict=pass&run=0")
    passed = sum(record.verdict is Verdict.PASS for record in runs[0].records)
    assert f"1 to 100 of {passed:,} cases" in browser.run("return document.getElementById('list').textContent")
    browser.run("document.querySelector('[data-turn=Next]').click()")
    assert f"101 to 200 of {passed:,} cases" in browser.run("return document.getElementById('list').textContent")
    browser.run(
        "const box = document.querySelector('#list select'); box.value = 'fast'; box.dispatchEvent(new "
        "Event('change'));"
    )
    speeds = browser.run(
        "return [...document.querySelectorAll('#list tbody tr')].map((row) => parseFloat(row.cells[4].textContent))"
    )
    assert speeds == sorted(speeds, reverse=True)
    figures = [measurement(record, "speed-up") for record in runs[0].records]
    fastest = max(figure.value for figure in figures if figure is not None and figure.value is not None)
    assert speeds[0] == pytest.approx(fastest, rel=1e-2)


def test_the_page_of_a_check_has_its_plot_and_techniques_lead_to_cases(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    document.write(path, load([of_a_check(tmp_path)]))
    for width in (400, 1400):
        browser.open(path, width=width)
        browser.see_everything()
        assert browser.run("return document.documentElement.scrollWidth") == width
        assert browser.said() == []
        assert browser.run("return document.querySelector('#speed canvas').getBoundingClientRect().height") > 200
    browser.run("[...document.querySelectorAll('#model tbody a')].find((one) => one.textContent === 'coarse').click();")
    browser.until("return document.getElementById('matches').textContent === '2 of 3 cases.'")


def test_a_cell_of_the_matrix_leads_to_its_cases(browser: Browser, stored: Path) -> None:
    browser.open(stored)
    browser.run(
        "[...document.querySelectorAll('#grid a')].find((one) => one.hash.includes('technique=compile-static') && "
        "one.hash.includes('run=0')).click()"
    )
    browser.until(
        "return location.hash.startsWith('#cases') && document.querySelectorAll('#list tbody tr').length === 1"
    )
    assert "compile-static/mlp/cpu/float32/forward" in browser.run("return document.getElementById('list').textContent")
    assert browser.run("return document.querySelector('#filters [name=technique]').value") == "compile-static"


def test_everything_is_reached_by_the_keyboard_and_shows_its_focus(browser: Browser, stored: Path) -> None:
    tab, enter = "\ue004", "\ue007"
    browser.open(stored)
    browser.press(tab)
    assert browser.run("return document.activeElement.textContent") == "Skip to the verdict"
    browser.press(enter)
    assert browser.run("return document.activeElement.id") == "verdict"
    browser.open(stored)
    browser.run("for (const one of document.querySelectorAll('#list, #overview details details')) one.remove();")
    wanted = browser.run(
        "return [...document.querySelectorAll('a[href], button:not(:disabled), select, input, summary, "
        '[tabindex="0"]\')]'
        ".filter((one) => one.checkVisibility()).length"
    )
    reached, bare, unnamed = set(), [], []
    for _ in range(wanted + 20):
        browser.press(tab)
        number, name, outline = browser.run(
            "const one = document.activeElement; window.met = window.met || []; if (!window.met.includes(one)) "
            "window.met.push(one);"
            "const label = one.closest('label'); const style = getComputedStyle(one);"
            "return [window.met.indexOf(one), (one.textContent + (one.getAttribute('aria-label') || '') + (label ? "
            "label.textContent : '')).trim(),"
            " one === document.body || style.outlineStyle !== 'none']"
        )
        reached.add(number)
        bare += [] if outline else [name]
        unnamed += [] if name else [number]
    assert len(reached) >= wanted
    assert bare == []
    assert unnamed == []


def test_a_folded_list_and_a_case_open_by_the_keyboard(browser: Browser, stored: Path) -> None:
    browser.open(stored)
    browser.run("document.querySelector('.cause details:last-of-type summary').focus()")
    browser.press("\ue007")
    assert browser.run("return document.querySelector('.cause details:last-of-type').open")
    browser.press("\ue004")
    wanted = browser.run("return document.activeElement.textContent")
    assert wanted.endswith("/float32/forward")
    browser.press("\ue007")
    browser.until("return !document.getElementById('page').hidden")
    assert wanted in browser.run("return document.getElementById('page').textContent")


@pytest.mark.parametrize("name",
    ["", "#case=compile-static/mlp/cpu/float32/forward", "#case=amp-bf16/speed-mlp/cpu/float32/speed",
    "#case=export/a-workload-with-a-name-that-is-as-long-as-any-that-a-vendor-may-think-of/cpu/float32/forward",
])  # fmt: skip
def test_a_phone_scrolls_no_page_sideways(browser: Browser, stored: Path, name: str) -> None:
    browser.open(stored, name, width=390)
    browser.see_everything()
    wide = browser.run(
        "return [...document.querySelectorAll('main:not([hidden]) *')].filter((one) => one.checkVisibility() && "
        "!one.closest('.scroll, pre, .unseen')"
        " && one.getBoundingClientRect().right > 390.5).map((one) => `${one.tagName} ${one.className} "
        "${one.textContent.slice(0, 60)}`)"
    )
    assert wide == []
    assert browser.run("return [innerWidth, document.documentElement.scrollWidth]") == [390, 390]


def test_a_command_is_copied(browser: Browser, stored: Path) -> None:
    browser.open(stored)
    browser.driver.execute_cdp_cmd(
        "Browser.grantPermissions", {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    )
    browser.run("document.querySelector('.command button').focus()")
    browser.press("\ue007")
    browser.until("return document.querySelector('.command button').textContent === 'Copied'")
    assert browser.run("return document.getElementById('said').textContent") == "The command is in the clipboard."
    violations = browser.driver.execute_async_script(
        "navigator.clipboard.readText().then(arguments[0], (error) => arguments[0](String(error)))"
    )
    assert violations == browser.run("return document.querySelector('.command code').textContent")


def test_hostile_texts_stay_texts(browser: Browser, tmp_path: Path) -> None:
    hostile = Record(
        case(HOSTILE, HOSTILE), Verdict.FAIL, HOSTILE, HOSTILE, (Evidence(HOSTILE, HOSTILE, engaged=False),),
        (Figure(HOSTILE, HOSTILE, 2.0, 1.0, HOSTILE, gates=True),), seconds={HOSTILE: 1.0}, traceback=HOSTILE,
        measurements=(Measurement(HOSTILE, 1.0, "x", 0.5, 2.0, HOSTILE),
            Measurement("speed-up", 2.0, "x", 1.0, 3.0, HOSTILE)),
        remark=HOSTILE, digest=HOSTILE, times=(1.0, 2.0),
    )  # fmt: skip
    runs = load([journal(tmp_path / "a.jsonl", [hostile])])
    document.write(tmp_path / "report.html", runs)
    browser.open(tmp_path / "report.html")
    browser.see_everything()
    assert browser.run("return document.querySelectorAll('img, iframe, object').length") == 0
    browser.run("document.querySelector('#list a.id').click()")
    browser.until("return !document.getElementById('page').hidden")
    browser.see_everything()
    text = browser.run("return document.getElementById('page').textContent")
    assert text.count("<img src=x onerror=alert(1)>") >= 8
    assert "\u202e" not in text
    assert r"\u202egnp.exe" in text
    assert browser.run("return document.querySelectorAll('img').length") == 0
    assert browser.said() == []


def test_what_is_planted_in_a_report_neither_runs_nor_loads(browser: Browser, stored: Path, tmp_path: Path) -> None:
    asked: list[str] = []

    class Server(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name of the base class
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        place = f"http://127.0.0.1:{server.server_address[1]}"
        planted = (
            f'<script>document.documentElement.dataset.ran = "yes"</script><script src="{place}/script"></script><img '
            f'src="{place}/image">'
            f'<img src="x" onerror="document.documentElement.dataset.ran = 1"><link rel="stylesheet" '
            f'href="{place}/style">'
            f'<iframe src="{place}/frame"></iframe><style>body {{ background: url({place}/back) }}</style>'
        )
        text = stored.read_text("utf-8").replace('<main id="overview">', f'<main id="overview">{planted}')
        (tmp_path / "planted.html").write_text(text, "utf-8")
        browser.open(tmp_path / "planted.html")
        browser.run(f"fetch('{place}/fetch').catch(() => 0)")
        assert browser.run("return document.documentElement.dataset.ran") is None
        assert sum("Content Security Policy" in line for line in browser.said()) >= 6
        assert asked == []
        free = text.replace('http-equiv="Content-Security-Policy"', 'http-equiv="none"')  # the test would see it
        (tmp_path / "free.html").write_text(free, "utf-8")
        browser.open(tmp_path / "free.html")
        assert browser.run("return document.documentElement.dataset.ran") == "1"
        assert "/image" in asked
    finally:
        server.shutdown()
        server.server_close()


def test_without_a_script_verdict_causes_and_matrix_are_there(browser: Browser, stored: Path) -> None:
    browser.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.open(stored, ready=False)
        tree = browser.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
        message = " ".join(str(node.get("name", {}).get("value", "")) for node in tree if not node.get("ignored"))
    finally:
        browser.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    for part in ("Not green: 2 of", "2 cases, 2 causes", "checkpoint-xla", "need JavaScript", "Fingerprints"):
        assert part in message, json.dumps(message[:2000])
    assert "sorted by" not in message
