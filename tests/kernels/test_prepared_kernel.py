"""Launches of a kernel that was found before."""

from __future__ import annotations

import pytest
from triton.compiler import CompiledKernel

from radixmesh.kernels.prepared_kernel import PreparedKernel


class _Compiled(CompiledKernel):
    def __init__(self) -> None:
        self.launches: list[tuple[object, ...]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> object:
        return lambda *arguments: self.launches.append((grid, arguments))


class _Kernel:
    """A JIT that gives these, one a launch."""

    def __init__(self, *found: object) -> None:
        self.found, self.launches = list(found), list[object]()

    def __getitem__(self, grid: tuple[int, int]) -> object:
        def run(*arguments: int, **options: object) -> object:
            self.launches.append((grid, arguments, options))
            return self.found.pop(0)

        return run


def test_a_kernel_is_looked_for_until_it_is_there() -> None:
    compiled = _Compiled()
    jit = _Kernel(None, object(), compiled)
    kernel = PreparedKernel(jit, num_warps=2, BLOCK=8, WORD=4)
    for number in range(5):
        kernel.launch(3, 1, number)
    options = {"BLOCK": 8, "WORD": 4, "num_warps": 2}
    assert jit.launches == [((3, 1), (number,), options) for number in range(3)]
    assert compiled.launches == [((3, 1, 1), (number, 8, 4)) for number in (3, 4)]


def test_nothing_runs_while_kernels_are_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = _Compiled()
    jit = _Kernel(compiled, compiled)
    kernel = PreparedKernel(jit, BLOCK=8)
    kernel.launch(1, 1, 0)
    monkeypatch.setattr(PreparedKernel, "is_only_compiled", True)
    kernel.launch(1, 1, 1)
    assert len(jit.launches) == 2 and not compiled.launches
