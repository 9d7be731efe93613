"""The panels as a picture: one HTML page with uPlot and the answers in it, photographed by a headless Chromium."""

from __future__ import annotations

import html
import json
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

_FOLDER = Path(__file__).parent / "page"
_UPLOT = _FOLDER / "node_modules" / "uplot" / "dist"
_WIDTH = 1760
# Grafana's grid: 24 columns, rows of 30 pixels with 8 between them.
_ROW_PX, _HEAD_PX, _FOOT_PX = 38, 72, 44
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_NOTE = (
    "Drawn by bench/observe.py with uPlot, from compose/observe/grafana/dashboards/radixmesh.json and the answers of a "
    "live Prometheus. The file is the one that Grafana loads; this picture was not made by Grafana."
)


class PageError(Exception):
    """The picture cannot be made; the message says what is missing."""


def draw(dashboard: Mapping[str, object], answers: Mapping[str, object], picture: Path) -> None:
    """Writes a PNG of all panels. Raises PageError."""
    browser = next((path for name in _BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        raise PageError("there is no Chromium on PATH; Debian has it: apt-get install chromium")
    with tempfile.TemporaryDirectory(prefix="dashboard-") as name:
        folder = Path(name)
        (folder / "page.html").write_text(page(dashboard, answers), encoding="utf-8")
        run = subprocess.run(
            [
                *(browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
                f"--user-data-dir={folder / 'profile'}",
                f"--window-size={_WIDTH},{_height(dashboard)}",
                f"--screenshot={folder / 'page.png'}",
                (folder / "page.html").as_uri(),
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if run.returncode != 0 or not (folder / "page.png").exists():
            raise PageError(f"{browser} made no picture (code {run.returncode}): {run.stderr[-1000:]}")
        shutil.copyfile(folder / "page.png", picture)


def page(dashboard: Mapping[str, object], answers: Mapping[str, object]) -> str:
    """The whole page, with nothing to load. Raises PageError without the packages of package-lock.json."""
    if not (_UPLOT / "uPlot.iife.min.js").exists():
        _install()
    data = json.dumps({"dashboard": dashboard, "answers": answers}, allow_nan=False).replace("</", "<\\/")
    style = (_UPLOT / "uPlot.min.css").read_text() + (_FOLDER / "page.css").read_text()
    code = (_UPLOT / "uPlot.iife.min.js").read_text() + (_FOLDER / "page.js").read_text()
    return (
        f"<!doctype html><meta charset=utf-8><title>{html.escape(str(dashboard['title']))}</title>"
        f"<style>{style}</style><header></header><main></main><footer>{html.escape(_NOTE)}</footer>"
        f'<script type="application/json" id="data">{data}</script><script>{code}</script>'
    )


def _install() -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise PageError("the panels are drawn by uPlot, which npm brings: install npm first")
    run = subprocess.run(
        [npm, "ci", "--prefix", str(_FOLDER), "--silent", "--no-audit", "--no-fund"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if run.returncode != 0:
        raise PageError(f"npm ci in {_FOLDER} failed: {run.stderr[-1000:]}")


def _height(dashboard: Mapping[str, object]) -> int:
    panels = dashboard["panels"]
    assert isinstance(panels, list)
    rows = max(int(panel["gridPos"]["y"]) + int(panel["gridPos"]["h"]) for panel in panels)
    return _HEAD_PX + rows * _ROW_PX + _FOOT_PX
