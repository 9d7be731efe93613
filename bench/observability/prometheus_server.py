"""A Prometheus of this machine with the scrape configuration that the compose overlay ships."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import yaml

from observability.prometheus_api import PrometheusApi, PrometheusError

_START_S = 30.0


class PrometheusServer:
    """The `prometheus` of PATH as a process; a context manager. `api` asks it, `url` is where it is.

    config: compose/observe/prometheus.yml. addresses: the name that the configuration looks up -> host:port of the
    metrics of all its replicas. Raises PrometheusError if there is no such program or it does not start.
    """

    def __init__(
        self, config: Path, addresses: Mapping[str, Sequence[str]], *, port: int, scrape_s: float | None = None
    ) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.api = PrometheusApi(self.url)
        self.scrape_s, self._config = localised(config.read_text(encoding="utf-8"), addresses, scrape_s=scrape_s)
        self._folder = tempfile.TemporaryDirectory(prefix="prometheus-")
        self._port = port
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> PrometheusServer:
        program = shutil.which("prometheus")
        if program is None:
            raise PrometheusError("there is no prometheus on PATH; Debian has it: apt-get install prometheus")
        folder = Path(self._folder.name)
        (folder / "prometheus.yml").write_text(self._config, encoding="utf-8")
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    program,
                    f"--config.file={folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{self._port}",
                    "--log.level=warn",
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + _START_S
        while not self.api.is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                said = (folder / "log").read_text(errors="replace")[-2000:]
                self.__exit__(None, None, None)
                raise PrometheusError(f"prometheus does not start; it said: {said}")
            time.sleep(0.1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._folder.cleanup()


def localised(text: str, addresses: Mapping[str, Sequence[str]], *, scrape_s: float | None) -> tuple[float, str]:
    """The configuration with addresses in place of names to look up, and its scrape interval in seconds.

    Raises PrometheusError for a name without an address: a daemon that nobody would scrape.
    """
    config = yaml.safe_load(text)
    if scrape_s is not None:
        config["global"] |= {"scrape_interval": f"{scrape_s * 1000:.0f}ms", "scrape_timeout": f"{scrape_s * 900:.0f}ms"}
    for job in config["scrape_configs"]:
        names = [name for discovery in job.pop("dns_sd_configs") for name in discovery["names"]]
        found = [address for name in names for address in addresses.get(name, ())]
        if not found:
            raise PrometheusError(f"job {job['job_name']} looks up {', '.join(names)}, and nothing of that name runs")
        job["static_configs"] = [{"targets": found}]
    interval = str(config["global"]["scrape_interval"])
    seconds = float(interval[:-2]) / 1000 if interval.endswith("ms") else float(interval.rstrip("s"))
    return seconds, yaml.safe_dump(config, sort_keys=False)
