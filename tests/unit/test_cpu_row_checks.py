"""The check at load covers every matrix that a family computes with, and what no tile serves runs row by row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from support import deepseek_folders, model_folders
from support.segments import Stream, scattered_pages
from torch.overrides import TorchFunctionMode

from radixmesh.daemons.worker.cpu import load_cpu_runner
from radixmesh.daemons.worker.cpu.determinism import verified_tiles
from radixmesh.daemons.worker.cpu.load import load_model
from radixmesh.daemons.worker.cpu.runner import CpuRunner
from radixmesh.daemons.worker.models.model import Model, Placement, RowInput, RowProbe
from radixmesh.daemons.worker.ranks.group import LocalGroup
from radixmesh.daemons.worker.tiles import RowTiles, Tensors, sizes_agree

_CPU = torch.device("cpu")
_PLACEMENT = Placement(device=_CPU, dtype=torch.float32, group=LocalGroup())
_SHAPES = ("llama", "qwen3", "mixtral", "qwen3_moe_some_layers", "v2_groups_yarn", "v3_odd_sizes", "v3_biases_tied")
_PRODUCTS = ("matmul", "mm", "bmm", "addmm", "baddbmm", "linear", "einsum", "mv")
_ALL_AT_ONCE = RowTiles(None)

Matrix = tuple[int, tuple[int, ...], tuple[int, ...]]
Save = Callable[[str], Path]


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Save:
    """Folders by shape, each made once."""
    torch.set_num_threads(1)
    folders: dict[str, Path] = {}

    def get(shape: str) -> Path:
        if shape not in folders:
            folder = tmp_path_factory.mktemp(shape)
            if shape in deepseek_folders.SHAPES:
                deepseek_folders.save_deepseek(deepseek_folders.random_deepseek(shape), folder)
            else:
                model_folders.save_model(model_folders.random_model(shape), folder)
            folders[shape] = folder
        return folders[shape]

    return get


class _Products(TorchFunctionMode):
    """Notes the weights that are multiplied with: address, shape and strides."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._memory = {tensor.untyped_storage().data_ptr() for tensor in weights.values()}
        self.seen: set[Matrix] = set()

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: tuple[object, ...] = (), kwargs: object = None
    ) -> object:
        if getattr(func, "__name__", "").strip("_") in _PRODUCTS:
            for arg in args:
                if isinstance(arg, torch.Tensor) and arg.untyped_storage().data_ptr() in self._memory:
                    self.seen.add((arg.data_ptr(), tuple(arg.shape), arg.stride()))
        return func(*args, **(kwargs or {}))  # type: ignore[call-overload]


def _run_probes(model: Model) -> None:
    for probe in model.row_probes():
        probe.function(tuple(torch.randn(2, *shape).to(dtype) for shape, dtype in probe.inputs))


@pytest.mark.parametrize("shape", [*_SHAPES, *model_folders.SCORING_SHAPES])
def test_every_matrix_of_a_forward_is_checked_at_load(save: Save, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(shape)
    built = []
    load = load_model
    monkeypatch.setattr(
        "radixmesh.daemons.worker.cpu.load.load_model",
        lambda *args, **more: built.append(load(*args, **more)) or built[-1],
    )
    runner = load_cpu_runner(folder, num_pages=400, threads=1)
    assert isinstance(runner, CpuRunner)
    model, targets = built[0].model, built[0].targets
    with _Products(targets.tensors) as probed, torch.inference_mode():
        _run_probes(model)
    ids = np.random.default_rng(0).integers(0, runner.vocab_size, 300).tolist()
    segment = Stream(0, ids, scattered_pages(runner, [300])[0]).segment(300, 1, samples=False)
    with _Products(targets.tensors) as used, torch.inference_mode():
        hidden_TD = model.forward(runner.batch_of([segment]))
        model.final_hidden(hidden_TD, _ALL_AT_ONCE)
        if shape in model_folders.SCORING_SHAPES:
            model.scores(hidden_TD, _ALL_AT_ONCE)
        else:
            model.logits(hidden_TD, _ALL_AT_ONCE)
    assert len(used.seen) > 2 * model.kv_layout.num_layers, "the products of all layers are seen"
    assert not used.seen - probed.seen
    # Experts that no row of that prompt picked count too: all experts' addresses are among those checked.
    checked = {address for address, _, _ in probed.seen}
    experts = [t for name, t in targets.tensors.items() if ".experts." in name and "down" in name and t.dim() == 2]
    assert {tensor.data_ptr() for tensor in experts} <= checked


def _by_index(inputs: Tensors) -> Tensors:
    return (inputs[0] + torch.arange(len(inputs[0]))[:, None] * 1e-3,)


def _sound(inputs: Tensors) -> Tensors:
    return (inputs[0] * 2,)


def _also_sound(inputs: Tensors) -> Tensors:
    return (inputs[0] + 1,)


def test_a_function_that_no_size_serves_runs_row_by_row_and_the_others_in_tiles(
    caplog: pytest.LogCaptureFixture,
) -> None:
    row = (RowInput((8,), torch.float32),)
    tiles = verified_tiles([RowProbe("sound", _sound, row), RowProbe("by_index", _by_index, row)], _CPU)
    assert tiles.sizes is not None and len(tiles.sizes) > 1 and tiles.row_by_row == {_by_index}
    (record,) = [record for record in caplog.records if record.getMessage() == "row_tiles_not_verified"]
    assert "by_index" in str(record.__dict__) and "one row at a time" in str(record.__dict__)
    x = torch.randn(tiles.padded(50), 8)
    assert torch.equal(tiles.map(_by_index, (x,))[0], x), "each row is at the first index"
    assert torch.equal(tiles.map(_sound, (x,))[0], x * 2)
    assert verified_tiles([RowProbe("by_index", _by_index, row)], _CPU).sizes == (1,)


def test_one_matrix_of_a_kind_that_differs_is_found() -> None:
    row = (RowInput((8,), torch.float32),)
    tiles = verified_tiles([RowProbe("expert", f, row) for f in (_sound, _also_sound, _by_index)], _CPU)
    assert tiles.row_by_row == {_by_index}


def test_an_order_that_shows_in_few_rows_is_found() -> None:
    """As of a router's softmax over five scores, whose few numbers differ in one row of ten."""

    def seldom_by_index(inputs: Tensors) -> Tensors:
        (x,) = inputs
        is_odd = (torch.arange(len(x)) % 2 == 1) & (x[:, 0] > 1.6)
        return (x[:, :2] + is_odd[:, None] * 1e-6,)

    tiles = verified_tiles([RowProbe("route", seldom_by_index, (RowInput((8,), torch.float32),))], _CPU)
    assert tiles.sizes == (1,)


def test_sizes_are_confirmed_only_where_all_give_the_same_bits() -> None:
    rows = (torch.randn(16, 8),)

    def other_in_fours(inputs: Tensors) -> Tensors:
        return (inputs[0] * (1.0 + 1e-6 * (len(inputs[0]) == 4)),)

    assert sizes_agree(_sound, rows, (2, 4, 8, 128))
    assert not sizes_agree(_by_index, rows, (2, 8)) and not sizes_agree(other_in_fours, rows, (2, 4, 8))
    assert not sizes_agree(_by_index, rows, (32,)), "copies of a row in one tile are compared"


def _in_chunks(runner: CpuRunner, ids: list[int], chunk: int) -> np.ndarray:
    runner.clear()
    stream = Stream(0, ids, scattered_pages(runner, [len(ids)], seed=chunk)[0])
    rows = []
    while stream.remaining:
        length = min(chunk, stream.remaining)
        rows += runner.logits([stream.segment(length, runner.page_size, samples=False)])
        stream.computed += length
    return np.concatenate(rows)


@pytest.mark.parametrize("shape", ["llama", "qwen3_moe_some_layers", "v3_odd_sizes"])
@pytest.mark.parametrize("is_all", [True, False], ids=["nothing_agrees", "experts_and_the_head_do_not"])
def test_rows_have_the_same_bits_where_no_tile_agrees(
    save: Save, shape: str, is_all: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Forced: the check finds nothing, for attention neither, or nothing for some functions."""
    monkeypatch.setattr("radixmesh.daemons.worker.cpu.attention.paged_torch.agreeing_sizes", lambda *_: ())
    if is_all:
        monkeypatch.setattr("radixmesh.daemons.worker.cpu.determinism.agreeing_sizes", lambda *_: ())
        monkeypatch.setattr("radixmesh.daemons.worker.cpu.determinism.sizes_agree", lambda *_: False)
    else:
        probes_of = verified_tiles

        def spoiled(probes: tuple[RowProbe, ...], device: torch.device) -> RowTiles:
            tiles = probes_of(probes, device)
            chosen = [probe.function for probe in probes if probe.name in ("expert", "head")]
            return RowTiles(tiles.sizes, [*tiles.row_by_row, *chosen])

        monkeypatch.setattr("radixmesh.daemons.worker.cpu.load.verified_tiles", spoiled)
    runner = load_cpu_runner(save(shape), num_pages=100, threads=1)
    assert isinstance(runner, CpuRunner) and runner.is_deterministic
    if is_all:
        assert "row_tiles_not_verified" in caplog.text
    ids = np.random.default_rng(5).integers(0, runner.vocab_size, 70).tolist()
    alone = _in_chunks(runner, ids, 1)
    for chunk in (70, 33, 7):
        assert np.array_equal(_in_chunks(runner, ids, chunk).view(np.int32), alone.view(np.int32)), chunk
