"""Takes the pictures of docs/report.md with chromium, of a report and of the page of a check: ``nox -s browser``.

The report shows stored journals, and planted faults: techniques of tests/plugin_harness.py, each wrong in one way.
"""

from __future__ import annotations

import argparse
import io
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from selenium import webdriver
from selenium.webdriver.support.wait import WebDriverWait

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "images"
STORED = ROOT / "baselines"
PLANTED = (
    "toy",
    "toy-value",
    "toy-nan",
    "toy-dtype",
    "toy-prepare",
    "toy-run",
    "toy-idle",
    "toy-segv",
    "toy-flaky",
    "toy-input",
    "toy-refused",
)
CONFTEST = f"""
import sys
sys.path.append({str(ROOT / "tests")!r})
def pytest_accel_techniques():
    import plugin_harness
    return plugin_harness.techniques()
def pytest_accel_workloads():
    import plugin_harness
    return plugin_harness.workloads()
"""
CASE = "#case=toy-value/small/cpu/float32/forward"
TIMED = "#case=jit-freeze/speed-mlp/cpu/float32/speed&run=0"
SHOTS = (
    ("report-verdict", "", 1200, 900, False, None),
    ("report-matrix", "#matrix", 1200, 900, True, None),
    ("report-case", CASE, 1200, 1150, False, None),
    ("report-timed", TIMED, 1200, 1500, True, "Time and memory"),
    ("report-plots", "#speed", 1200, 1300, False, None),
    ("report-phone", "", 390, 844, False, None),
)
"""Name, address, width, height, dark, heading to scroll to."""
OF_A_CHECK = (("report-model", "", 1400, 1330, False, None), ("report-model-phone", "", 400, 1130, False, None))
"""Pictures of the page of a check, in the same form."""
MODEL = "examples/language/test_language.py:make"
TRIED = (
    "eager amp-bf16 compile-static export onnxruntime openvino int8-torchao-weight-only int4-torchao-weight-only "
    "optimizer-fused sdpa-flash"
)
COLOURS = 256
"""Colours of a picture's palette."""


def main() -> int:
    """Make the report, and take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--journal", type=Path, help="journal of planted faults; made if not given")
    parser.add_argument("--check", type=Path, help="page of a check; made if it is not given, in some minutes")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        journal = given.journal or _planted(folder)
        report = folder / "report.html"
        stored = ("cpu/level1.jsonl", "cpu/level1-speed.jsonl", "xla/level1.jsonl")
        words = [*(str(STORED / journal_name) for journal_name in stored), str(journal)]
        for option in ("curve", "claims"):
            words += [f"--{option}={STORED / device / option}.json" for device in ("cpu", "xla")]
        subprocess.run(
            [sys.executable, "-m", "accelcheck.cli", "report", *words, "-o", str(report)], check=True, cwd=ROOT
        )
        IMAGES.mkdir(exist_ok=True)
        with _browser() as shown:
            for shot in SHOTS:
                print(_taken(shown, report, *shot))
            page = given.check or _checked(folder / "check.html")
            for shot in OF_A_CHECK:
                print(_taken(shown, page, *shot))
    return 0


def _planted(folder: Path) -> Path:
    """The journal of a run with planted faults, which fails as it must."""
    (folder / "conftest.py").write_text(CONFTEST, "ascii")
    journal = folder / "journal.jsonl"
    chosen = [f"--accel-technique={name}" for name in PLANTED]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--pyargs",
        "accelcheck.suite.test_numerics",
        "--accel-device=cpu",
        *chosen,
        f"--accel-journal={journal}",
        "-q",
    ]
    subprocess.run(command, cwd=folder, check=False, capture_output=True)
    return journal


def _checked(page: Path) -> Path:
    """The page of a check of a small Llama."""
    words = [MODEL, "--device=cpu", f"--report={page}", *(f"--technique={name}" for name in TRIED.split())]
    subprocess.run([sys.executable, "-m", "accelcheck", "check", *words], cwd=ROOT, check=False)
    return page


def _browser() -> Any:
    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for word in ("--headless=new", "--hide-scrollbars", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(word)
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))


def _taken(
    shown: Any, report: Path, name: str, address: str, width: int, height: int,
    dark: bool, heading: str | None,  # noqa: FBT001 - a row of the table above
) -> str:  # fmt: skip
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    shown.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    shown.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    shown.get("about:blank")
    shown.get(f"{report.as_uri()}{address}")
    WebDriverWait(shown, 60).until(lambda _: shown.execute_script("return document.documentElement.dataset.ready"))
    find = "[...document.querySelectorAll('h3')].find((title) => title.textContent === arguments[0])?.scrollIntoView()"
    shown.execute_script(f"document.activeElement.blur(); {find}", heading)
    WebDriverWait(shown, 60).until(lambda _: shown.execute_script(
        "return [...document.querySelectorAll('main:not([hidden]) .plot')].every("
        "(plot) => plot.firstChild || plot.getBoundingClientRect().top > innerHeight)"
    ))  # fmt: skip
    picture = Image.open(io.BytesIO(shown.get_screenshot_as_png())).convert("RGB")
    path = IMAGES / f"{name}.png"
    picture.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(path, optimize=True)
    return f"{path.relative_to(ROOT)}: {path.stat().st_size / 1024:.0f} KiB"


if __name__ == "__main__":
    sys.exit(main())
