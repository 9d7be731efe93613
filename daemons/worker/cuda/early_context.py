"""The device's primary context, made while torch is imported: each takes some tenths of a second by itself."""

from __future__ import annotations

import ctypes
import threading


def make_context_beside(device: int = 0) -> None:
    """Starts to make it, in a thread of its own. torch takes the one that is there; what fails here it says itself. May
    be called again."""
    threading.Thread(target=_retain, args=(device,), name="context", daemon=True).start()


def _retain(device: int) -> None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(handle), device) == 0:
        # Never given back: the process holds it for as long as it lives.
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)
