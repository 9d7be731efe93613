"""A Docker engine for tests: the one that runs here, or one of our own from Debian's packages.

The engine is not installed but unpacked into a cache, so that its version does not depend on the machine's Debian; only
what it runs (runc, iptables) is. Its state lies in a temporary folder and leaves with it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

CACHE = Path(__file__).parents[2] / ".tools" / "engine"
# Docker 26 and Compose 2.26: older ones know no start_interval.
_SUITE = "trixie"
_PACKAGES = ("docker.io", "docker-cli", "docker-compose", "docker-buildx", "containerd")
# Need a newer libc than older machines have, or libraries of their own: the machine's packages.
_PROGRAMS = {"runc": "runc", "iptables": "iptables", "debootstrap": "debootstrap"}
_START_S = 90.0


class NoEngineError(Exception):
    """Why there is no engine here."""


@dataclass(slots=True, kw_only=True)
class Engine:
    """environment: what `docker` needs to reach it. is_ours: whether stop() ends it."""

    environment: Mapping[str, str]
    is_ours: bool
    _daemon: subprocess.Popen[bytes] | None = None
    _folder: Path | None = field(default=None)

    def docker(self, *arguments: str, timeout_s: float = 60.0, check: bool = True) -> str:
        """Runs `docker ...` and returns what it prints. Raises AssertionError with its words when it fails."""
        done = subprocess.run(
            ["docker", *arguments], env=self.environment, capture_output=True, text=True, timeout=timeout_s
        )
        assert not check or done.returncode == 0, f"docker {' '.join(arguments)}: {done.stdout}{done.stderr}"
        return done.stdout

    def logs(self, container: str) -> str:
        """Output of a container, on both streams."""
        done = subprocess.run(
            ["docker", "logs", container],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
        )
        return done.stdout

    def stop(self) -> None:
        """Ends what start_engine() started, containers included."""
        if self._daemon is None or self._folder is None:
            return
        left = self.docker("ps", "-aq", check=False).split()
        if left:
            self.docker("rm", "-f", *left, check=False, timeout_s=120)
        self._daemon.terminate()
        try:
            self._daemon.wait(60)
        except subprocess.TimeoutExpired:
            self._daemon.kill()
            self._daemon.wait(10)
        for line in reversed(Path("/proc/mounts").read_text().splitlines()):
            if line.split()[1].startswith(str(self._folder)):
                subprocess.run(["umount", "-l", line.split()[1]], check=False)
        shutil.rmtree(self._folder, ignore_errors=True)


def find_or_start_engine() -> Engine:
    """The engine that DOCKER_HOST or the default socket leads to, else a new one. Raises NoEngineError."""
    running = Engine(environment=dict(os.environ), is_ours=False)
    if shutil.which("docker") and _answers(running):
        try:
            running.docker("compose", "version", "--short")
        except AssertionError as error:
            raise NoEngineError(f"Docker runs here without Compose 2: install its plugin ({error})") from None
        return running
    if os.geteuid() != 0:
        raise NoEngineError("no Docker engine answers here, and only root can start one: start Docker, or run as root")
    if not shutil.which("apt-get"):
        raise NoEngineError("no Docker engine answers here, and this is no Debian to take one from: start Docker")
    _install_programs()
    _unpack_packages()
    return _start()


def _answers(engine: Engine) -> bool:
    try:
        return bool(engine.docker("info", "--format", "{{.ServerVersion}}", timeout_s=20, check=False).strip())
    except (OSError, subprocess.TimeoutExpired):
        return False


def _install_programs() -> None:
    environment = {**os.environ, "PATH": _path()}
    missing = [package for program, package in _PROGRAMS.items() if not shutil.which(program, path=environment["PATH"])]
    if not missing:
        return
    _run("apt-get", "update", "-qq")
    _run("apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing)


def _unpack_packages() -> None:
    """Debian's packages of the engine into CACHE, whole or not at all."""
    if (CACHE / "usr/sbin/dockerd").exists():
        return
    CACHE.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE.parent) as folder:
        work = Path(folder)
        for name in ("lists/partial", "cache/archives/partial", "debs", "root"):
            (work / name).mkdir(parents=True)
        keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"
        sources = work / "sources.list"
        sources.write_text(f"deb [signed-by={keyring}] http://deb.debian.org/debian {_SUITE} main\n")
        # An apt of its own: the machine's lists and sources stay as they are.
        apt = [
            "apt-get",
            "-qq",
            f"-oDir::Etc::sourcelist={sources}",
            "-oDir::Etc::sourceparts=/dev/null",
            f"-oDir::State::lists={work / 'lists'}",
            f"-oDir::Cache={work / 'cache'}",
            "-oAPT::Sandbox::User=root",
        ]
        _run(*apt, "update")
        _run(*apt, "download", *_PACKAGES, cwd=work / "debs")
        for package in (work / "debs").glob("*.deb"):
            _run("dpkg-deb", "-x", str(package), str(work / "root"))
        (work / "root").rename(CACHE)


def _start() -> Engine:
    folder = Path(tempfile.mkdtemp(prefix="radixmesh-engine-"))
    plugins = folder / "config" / "cli-plugins"
    plugins.mkdir(parents=True)
    for plugin in (CACHE / "usr/libexec/docker/cli-plugins").iterdir():
        (plugins / plugin.name).symlink_to(plugin)
    socket = f"unix://{folder}/docker.sock"
    environment = {
        **os.environ,
        "PATH": _path(),
        "DOCKER_HOST": socket,
        "DOCKER_CONFIG": str(folder / "config"),
    }
    log = folder / "dockerd.log"
    # The machine's network stays as it is: no default bridge, no rules, no forwarding. Containers reach each other on
    # networks of their own, and the machine's ports reach them through docker-proxy.
    command = [
        str(CACHE / "usr/sbin/dockerd"),
        *("--host", socket, "--pidfile", str(folder / "dockerd.pid")),
        *("--data-root", str(folder / "data"), "--exec-root", str(folder / "exec")),
        *("--bridge", "none", "--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false"),
        f"--userland-proxy-path={CACHE / 'usr/sbin/docker-proxy'}",
    ]
    with log.open("wb") as output:
        daemon = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    engine = Engine(environment=environment, is_ours=True, _daemon=daemon, _folder=folder)
    until = time.monotonic() + _START_S
    while daemon.poll() is None and time.monotonic() < until:
        if _answers(engine):
            return engine
        time.sleep(0.5)
    last_words = "\n".join(log.read_text(errors="replace").splitlines()[-5:])
    engine.stop()
    raise NoEngineError(f"dockerd does not start on this machine; its last words: {last_words}")


def _path() -> str:
    ours = f"{CACHE}/usr/bin:{CACHE}/usr/sbin"
    return f"{ours}:{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def _run(*command: str, cwd: Path | None = None) -> None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise NoEngineError(f"{' '.join(command[:2])} failed, so there is no engine here: {done.stderr.strip()[-500:]}")
