"""Launches of a Triton kernel by numbers alone, for what is launched beside steps from a thread that has better to do.

The JIT finds a kernel by what it is told of each argument, at each launch: tensors, divisors, constants. That takes the
host some 50 us; a kernel that was found before is launched in 5 (measured beside an H200, Triton 3.6).
"""

from __future__ import annotations

import triton
from triton.compiler import CompiledKernel


class PreparedKernel:
    """A kernel on one device, with its constants: they come behind its other parameters, in this order. Those are
    integers that the kernel is not specialised for (`do_not_specialize`), each as wide as ever: addresses, for one, of
    any memory that the device reaches.

    The first launch is the JIT's, and compiles it.
    """

    is_only_compiled = False
    """Kernels are being compiled ahead of their use: all launches of the process are the JIT's, which runs nothing."""

    def __init__(self, kernel: triton.runtime.KernelInterface[object], num_warps: int = 4, **constants: object) -> None:
        self._kernel, self._num_warps, self._constants = kernel, num_warps, constants
        self._compiled: CompiledKernel | None = None

    def launch(self, columns: int, rows: int, *arguments: int) -> None:
        """On the current stream, of so many programs on the first axis and the second."""
        compiled = self._compiled
        if compiled is not None and not self.is_only_compiled:
            compiled[columns, rows, 1](*arguments, *self._constants.values())
            return
        found = self._kernel[columns, rows](*arguments, **self._constants, num_warps=self._num_warps)
        # The interpreter finds nothing that could be launched again, and what is being compiled is not there yet.
        if isinstance(found, CompiledKernel):
            self._compiled = found
