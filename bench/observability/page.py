"""The panels as a picture: Grafana's components with the answers in a page, photographed by a headless Chromium."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

_FOLDER = Path(__file__).parent / "page"
_ESBUILD = _FOLDER / "node_modules" / ".bin" / "esbuild"
_WIDTH = 1760
# Grafana's grid: 24 columns, rows of 30 pixels with 8 between them.
_ROW_PX, _HEAD_PX, _FOOT_PX = 38, 72, 44
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_NOTE = (
    "compose/observe/grafana/dashboards/radixmesh.json with the answers of a live Prometheus, drawn by "
    "bench/observe.py with the components of @grafana/ui 11.6, without a Grafana server."
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
        _build(folder)
        content = {"dashboard": dashboard, "answers": answers, "note": _NOTE}
        data = json.dumps(content, allow_nan=False).replace("</", "<\\/")
        (folder / "page.html").write_text(
            "<!doctype html><meta charset=utf-8><link rel=stylesheet href=page.css><div id=page></div>"
            f'<script id=data type="application/json">{data}</script><script src=page.js></script>',
            encoding="utf-8",
        )
        _run(
            *(browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            *("--allow-file-access-from-files", "--virtual-time-budget=10000"),
            f"--user-data-dir={folder / 'profile'}",
            f"--window-size={_WIDTH},{_height(dashboard)}",
            f"--screenshot={folder / 'page.png'}",
            (folder / "page.html").as_uri(),
        )
        shutil.copyfile(folder / "page.png", picture)


def _build(folder: Path) -> None:
    """page.js and page.css, from page.jsx and the packages of package-lock.json, which are fetched once (600 MB)."""
    if not _ESBUILD.exists():
        npm = shutil.which("npm")
        if npm is None:
            raise PageError("the panels are drawn by Grafana's components, which npm brings: install npm first")
        _run(npm, "ci", "--prefix", str(_FOLDER), "--silent", "--no-audit", "--no-fund", "--ignore-scripts")
    _run(
        *(str(_ESBUILD), str(_FOLDER / "page.jsx"), f"--outfile={folder / 'page.js'}"),
        *("--bundle", "--minify", "--format=iife", "--jsx=automatic", "--log-level=error"),
        *("--define:global=globalThis", '--define:process.env.NODE_ENV="production"'),
        # The editor's icons, which no panel shows.
        *("--loader:.ttf=empty", "--loader:.woff=empty", "--loader:.woff2=dataurl"),
    )


def _run(*command: str) -> None:
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if run.returncode != 0:
        raise PageError(f"{command[0]} failed (code {run.returncode}): {run.stderr[-1000:]}")


def _height(dashboard: Mapping[str, object]) -> int:
    panels = dashboard["panels"]
    assert isinstance(panels, list)
    rows = max(int(panel["gridPos"]["y"]) + int(panel["gridPos"]["h"]) for panel in panels)
    return _HEAD_PX + rows * _ROW_PX + _FOOT_PX
