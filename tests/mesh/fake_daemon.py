"""A process for the supervisor's tests: serves grpc.health.v1 and misbehaves as FAKE_* variables ask.

FAKE_CRASH=code: exits at once. FAKE_LOADING_S: answers NOT_SERVING for so long first. FAKE_STALL_FILE: answers
NOT_SERVING while that file exists. FAKE_IGNORE_TERM: does not end on SIGTERM. FAKE_CHILD_FILE: starts a child of its
own and writes its pid there.
"""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


class Health(health_pb2_grpc.HealthServicer):
    def __init__(self):
        self._serves_at = time.monotonic() + float(os.environ.get("FAKE_LOADING_S", "0"))
        self._stall_file = os.environ.get("FAKE_STALL_FILE")

    def Check(self, request, context):
        is_stalled = self._stall_file is not None and Path(self._stall_file).exists()
        is_serving = time.monotonic() >= self._serves_at and not is_stalled
        status = health_pb2.HealthCheckResponse
        return status(status=status.SERVING if is_serving else status.NOT_SERVING)


def main():
    print(f"hello from {os.getpid()}")
    if "FAKE_CRASH" in os.environ:
        sys.exit(int(os.environ["FAKE_CRASH"]))
    if "FAKE_CHILD_FILE" in os.environ:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        Path(os.environ["FAKE_CHILD_FILE"]).write_text(str(child.pid))
    server = grpc.server(ThreadPoolExecutor(2), options=(("grpc.so_reuseport", 0),))
    health_pb2_grpc.add_HealthServicer_to_server(Health(), server)
    server.add_insecure_port(os.environ["RADIXMESH_LISTEN"])
    server.start()
    stopped = []  # No Event: set by a handler that interrupts the thread on its way into wait(), it would deadlock.
    signal.signal(signal.SIGTERM, lambda *_: None if "FAKE_IGNORE_TERM" in os.environ else stopped.append(True))
    print(f"peers {os.environ.get('FAKE_PEERS', '')}")
    while not stopped:
        time.sleep(0.01)
    print("goodbye")
    server.stop(0)


main()
