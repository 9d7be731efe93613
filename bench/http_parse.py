"""Cost of request bodies in the router: seconds per MiB, silence of its event loop, peak memory.

The router is the real daemon without peers: whatever is legal ends soon for want of a scheduler or a tokenizer.
Silence is the longest answer time of /health, asked all the while on a connection of its own; memory is the sum of
the resident peaks of the router and its children, above what they held before the body.

    python bench/http_parse.py --mib 16 --out bench/results/http-parse.json
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import platform
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

PING_S = 0.002
ANSWER_S = 120.0


def repeated(head: bytes, part: bytes, tail: bytes, size: int) -> bytes:
    """head, then as many comma-separated parts as make up `size` bytes, then tail."""
    num = max(1, (size - len(head) - len(tail)) // (len(part) + 1))
    return head + (part + b",") * (num - 1) + part + tail


def bodies(size: int) -> dict[str, tuple[str, bytes]]:
    """By name: path and body, each of about `size` bytes."""
    completions, chat, native = "/v1/completions", "/v1/chat/completions", "/generate"
    user = b'{"role":"user","content":""}'
    text = b"The Tyger, burning bright. " * (size // 27)
    return {
        "ids": (completions, repeated(b'{"prompt":[', b"300", b"]}", size)),
        "small ids": (completions, repeated(b'{"prompt":[', b"7", b"]}", size)),
        "one text": (completions, b'{"prompt":"' + text + b'"}'),
        "text of quotes": (completions, b'{"prompt":"' + b'\\"' * (size // 2) + b'"}'),
        "text of commas": (completions, b'{"prompt":"' + b"," * size + b'"}'),
        "many texts": (completions, repeated(b'{"prompt":[', b'"a"', b"]}", size)),
        "lists of ids": (completions, repeated(b'{"prompt":[', b"[7,8,9]", b"]}", size)),
        "wrong stop ids": (completions, repeated(b'{"prompt":"x","stop_token_ids":[', b'"a"', b"]}", size)),
        "stops": (completions, repeated(b'{"prompt":"x","stop":[', b'"a"', b"]}", size)),
        "biases": (completions, repeated(b'{"prompt":"x","logit_bias":{', b'"77":1', b"}}", size)),
        "unknown field": (completions, repeated(b'{"prompt":"x","other":[', b"{}", b"]}", size)),
        "unknown fields": (completions, repeated(b'{"prompt":"x",', b'"a":1', b"}", size)),
        "deep": (completions, b'{"prompt":' + b"[" * size),
        "huge number": (completions, b'{"prompt":"x","n":' + b"9" * size + b"}"),
        "messages": (chat, repeated(b'{"messages":[', user, b"]}", size)),
        "parts": (chat, repeated(b'{"messages":[{"role":"user","content":[', b"{}", b"]}]}", size)),
        "extras": (chat, repeated(b'{"messages":[{"role":"user","content":"","x":[', b"1", b"]}]}", size)),
        "tools": (chat, repeated(b'{"messages":[' + user + b'],"tools":[', b"{}", b"]}", size)),
        "template args": (
            chat,
            repeated(b'{"messages":[' + user + b'],"chat_template_kwargs":{"x":[', b"[]", b"]}}", size),
        ),
        "sampling params": (native, repeated(b'{"text":"x","sampling_params":[', b"{}", b"]}", size)),
        "embeddings": ("/v1/embeddings", repeated(b'{"input":[', b'"a"', b"]}", size)),
        "tokenize": ("/tokenize", repeated(b'{"prompt":[', b'"a"', b"]}", size)),
        "detokenize": ("/detokenize", repeated(b'{"tokens":[', b"[7]", b"]}", size)),
    }


class RouterProcess:
    """A router without peers. memory() and peak() count its children too."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        flags = ["--listen", "127.0.0.1:0", "--http-listen", f"127.0.0.1:{self.port}", "--log-level", "error"]
        waits = ["--scheduler-wait-s", "0.05", "--tokenizer-wait-s", "0.05", "--http-body-bytes", str(17 << 20)]
        command = [sys.executable, "-m", "radixmesh.daemons.router", *flags, *waits]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                self.post("/v1/completions", b"{")
                return
            except OSError:
                time.sleep(0.05)
        raise TimeoutError("the router does not answer")

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def post(self, path: str, body: bytes) -> tuple[int, str]:
        """Status and error code."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_S)
        try:
            connection.request("POST", path, body, {"content-type": "application/json"})
            answer = connection.getresponse()
            data = answer.read()
            return answer.status, str(json.loads(data).get("error", {}).get("code", ""))
        finally:
            connection.close()

    def reset_peak(self) -> None:
        for pid in self._pids():
            Path(f"/proc/{pid}/clear_refs").write_text("5")

    def memory(self, field: str) -> int:
        """Bytes; field: VmRSS (now) or VmHWM (the peak since reset_peak())."""
        total = 0
        for pid in self._pids():
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith(field):
                    total += int(line.split()[1]) << 10
        return total

    def _pids(self) -> Iterator[int]:
        pid = self._process.pid
        yield pid
        for task in Path(f"/proc/{pid}/task").iterdir():
            yield from map(int, (task / "children").read_text().split())


@contextmanager
def pinged(port: int) -> Iterator[Callable[[], float]]:
    """The longest answer time of /health so far, in seconds."""
    longest, is_over = [0.0], threading.Event()

    def ping() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)
        while not is_over.is_set():
            begun = time.monotonic()
            connection.request("GET", "/health")
            connection.getresponse().read()
            longest[0] = max(longest[0], time.monotonic() - begun)
            time.sleep(PING_S)
        connection.close()

    thread = threading.Thread(target=ping)
    thread.start()
    try:
        yield lambda: longest[0]
    finally:
        is_over.set()
        thread.join()


def measured(router: RouterProcess, path: str, body: bytes) -> dict[str, object]:
    router.reset_peak()
    before = router.memory("VmRSS")
    with pinged(router.port) as silence:
        begun = time.monotonic()
        status, code = router.post(path, body)
        seconds = time.monotonic() - begun
    mib = len(body) / (1 << 20)
    return {
        "status": status,
        "code": code,
        "mib": round(mib, 3),
        "seconds_per_mib": round(seconds / mib, 5),
        "loop_silence_s": round(silence(), 4),
        "peak_above_before_mib": round((router.memory("VmHWM") - before) / (1 << 20), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=float, default=16.0, help="size of the bodies")
    parser.add_argument("--only", nargs="*", help="names of bodies")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results: dict[str, dict[str, object]] = {}
    for name, (path, body) in bodies(int(args.mib * (1 << 20))).items():
        if args.only and name not in args.only:
            continue
        # One router per body: what one leaves in the allocator is not the next one's.
        router = RouterProcess()
        try:
            router.post(path, b'{"x":"' + b" " * (1 << 20) + b'"}')  # Starts all that starts lazily.
            results[name] = measured(router, path, body)
        except OSError as error:
            results[name] = {"failed": repr(error)}
        finally:
            router.stop()
        print(f"{name:18} {results[name]}", file=sys.stderr)
    report = {
        "command": " ".join(["python bench/http_parse.py", *sys.argv[1:]]),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "bodies": results,
    }
    text = json.dumps(report, indent=1) + "\n"
    if args.out:
        args.out.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
