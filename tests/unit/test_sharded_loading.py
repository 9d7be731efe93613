"""Loading by slices: the shares of all ranks are the whole tensor, memory stays below weights and one tensor, and the
log says how far it is."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.fp8_folders import Form, write_fp8
from support.llama_folders import TINY_LLAMA
from support.model_folders import random_model, save_model

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.worker.checkpoint import load_progress
from radixmesh.daemons.worker.checkpoint.config_reader import ConfigReader
from radixmesh.daemons.worker.checkpoint.load_progress import LoadProgress
from radixmesh.daemons.worker.checkpoint.loader import OtherTarget, TensorTargets, load_tensors
from radixmesh.daemons.worker.checkpoint.quantization import BLOCK, read_quantization
from radixmesh.daemons.worker.checkpoint.scaled_weights import ScaledWeights
from radixmesh.daemons.worker.checkpoint.tensor_index import index_tensors
from radixmesh.daemons.worker.checkpoint.tensor_reader import TensorReader
from radixmesh.daemons.worker.checkpoint.tensor_slice import TensorSlice
from radixmesh.daemons.worker.models.decoder.config import DecoderConfig
from radixmesh.daemons.worker.models.decoder.names import CheckpointNames
from radixmesh.daemons.worker.models.decoder.sharding import DecoderShard, shard_decoder
from radixmesh.daemons.worker.models.llama.config import read_llama_config
from radixmesh.daemons.worker.models.rope_config import RopeConfig
from radixmesh.daemons.worker.models.sharding import share_of

_FUSED = CheckpointNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))


def _config(num_kv_heads: int, group: int, head_dim: int, mlp_size: int, names: CheckpointNames) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=131,
        hidden_size=16,
        mlp_size=mlp_size,
        num_layers=1,
        num_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_total_len=64,
        norm_eps=1e-5,
        rope=RopeConfig(theta=1e4),
        windows=(None,),
        is_tied=False,
        names=names,
    )


def _shards(config: DecoderConfig, num_ranks: int, block: int) -> list[DecoderShard] | None:
    """None where there are too many ranks, which is said."""
    try:
        return [shard_decoder(config, num_ranks, rank, block=block) for rank in range(num_ranks)]
    except MeshError as error:
        assert error.reason_name == "INVALID_ARGUMENT" and "--tp-size" in str(error)
        return None


@given(
    num_kv_heads=st.integers(1, 8),
    group=st.sampled_from((1, 2, 4, 8)),
    head_dim=st.sampled_from((32, 64, 96, 128)),
    mlp_size=st.integers(128, 1500),
    names=st.sampled_from((CheckpointNames(), _FUSED)),
    num_ranks=st.integers(1, 8),
    block=st.sampled_from((1, BLOCK)),
)
def test_the_shares_of_all_ranks_are_the_whole_tensor(
    num_kv_heads: int, group: int, head_dim: int, mlp_size: int, names: CheckpointNames, num_ranks: int, block: int
) -> None:
    config = _config(num_kv_heads, group, head_dim, mlp_size, names)
    shards = _shards(config, num_ranks, block)
    if shards is None:
        # One head, or one block, for each rank is not there.
        assert num_ranks > min(config.num_heads * head_dim // block, -(-mlp_size // block), num_kv_heads * group) or (
            block > 1
        )
        return
    for name, first in shards[0].slices.items():
        cuts = [shard.slices[name] for shard in shards]
        assert {(cut.dim, cut.size) for cut in cuts} == {(first.dim, first.size)}
        times = [0] * first.size
        for cut in cuts:
            for start, stop in cut.ranges:
                assert 0 <= start < stop <= first.size
                for index in range(start, stop):
                    times[index] += 1
        is_kv = ".k_proj" in name or ".v_proj" in name or "qkv_proj" in name
        assert min(times) == 1 or (is_kv and num_ranks > num_kv_heads and min(times) >= 1), name
        if not is_kv or num_ranks <= num_kv_heads:
            assert max(times) == 1, name
        if block > 1 and name.endswith(("o_proj.weight", "down_proj.weight")):
            assert all(cut.is_aligned(block) for cut in cuts)
    for shard in shards:
        local, ranks_kv = shard.config, shard.config.num_kv_heads
        assert local.num_heads % ranks_kv == 0 and local.num_heads >= 1 and local.mlp_size >= 1
    if num_ranks <= num_kv_heads:
        assert sum(shard.config.num_heads for shard in shards) == config.num_heads
        assert sum(shard.config.num_kv_heads for shard in shards) == num_kv_heads


@given(total=st.integers(1, 500), num_ranks=st.integers(1, 8), unit=st.integers(1, 64))
def test_shares_differ_by_one_unit_at_most(total: int, num_ranks: int, unit: int) -> None:
    num_units = -(-total // unit)
    if num_units < num_ranks:
        with pytest.raises(MeshError):
            share_of(total, num_ranks, 0, unit=unit)
        return
    shares = [share_of(total, num_ranks, rank, unit=unit) for rank in range(num_ranks)]
    assert shares[0].start == 0 and shares[-1].stop == total
    assert all(a.stop == b.start for a, b in itertools.pairwise(shares))
    units = [-(-share.size // unit) for share in shares]
    assert max(units) - min(units) <= 1


@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_ranks_read_their_shares_of_a_checkpoint(num_ranks: int, tmp_path: Path) -> None:
    """And no more: the bytes that are read are those of the shares."""
    folder = save_model(random_model("llama", num_attention_heads=8), tmp_path)
    config, tensors = read_llama_config(ConfigReader.open(folder)), load_file(folder / "model.safetensors")
    entries, found = index_tensors(folder), {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    shards = _shards(config, num_ranks, 1)
    assert shards is not None
    for shard in shards:
        with TensorReader(entries) as reader:
            for name, cut in shard.slices.items():
                if name in tensors:
                    before, at = reader.num_bytes, 0
                    share = reader.read(name, cut)
                    for start, stop in cut.ranges:
                        found[name].narrow(cut.dim, start, stop - start).copy_(share.narrow(cut.dim, at, stop - start))
                        at += stop - start
                    whole = tensors[name]
                    assert reader.num_bytes - before == whole.nbytes * cut.length // whole.shape[cut.dim]
    for name in shards[0].slices:
        if name in tensors:
            assert torch.equal(found[name], tensors[name]), name


@pytest.mark.parametrize("form", [Form.BLOCK, Form.COMPRESSED_CHANNEL])
@pytest.mark.parametrize("cut", [TensorSlice(0, ((64, 200), (20, 40)), 320), TensorSlice(1, ((128, 256),), 320)])
def test_shares_of_fp8_weights_have_their_scales(form: Form, cut: TensorSlice, tmp_path: Path) -> None:
    plain, weight = tmp_path / "plain", torch.randn(320, 320) * torch.linspace(0.1, 9, 320)[:, None]
    plain.mkdir()
    (plain / "config.json").write_text((TINY_LLAMA / "config.json").read_text())
    save_file({"model.layers.0.mlp.up_proj.weight": weight}, plain / "model.safetensors")
    folder = write_fp8(plain, tmp_path / "fp8", form)
    name, entries = "model.layers.0.mlp.up_proj.weight", index_tensors(folder)
    scaled = ScaledWeights(folder, entries, read_quantization(ConfigReader.open(folder)))
    with TensorReader(entries) as reader:
        whole, share = scaled.read(reader, name), scaled.read(reader, name, cut)
    want = torch.cat([whole.narrow(cut.dim, start, stop - start) for start, stop in cut.ranges], dim=cut.dim)
    assert torch.equal(share, want)


def test_targets_name_the_share_that_they_are(tmp_path: Path) -> None:
    whole = torch.arange(60.0).view(10, 6)
    save_file({"old": whole}, tmp_path / "model.safetensors")
    target, cut = torch.zeros(4, 6), TensorSlice(0, ((6, 10),), 10)
    # The checkpoint has it by another name.
    others = {"old": OtherTarget(tensor=target, replaces=("new",))}
    targets = TensorTargets(tensors={"new": target}, is_ignored=lambda _: False, others=others, slices={"new": cut})
    assert load_tensors(tmp_path, targets) == 4 * 6 * 4
    assert torch.equal(target, whole[6:])
    wrong = TensorTargets(tensors={"old": target}, is_ignored=lambda _: False, slices={"old": cut._replace(size=12)})
    with pytest.raises(MeshError, match=r"shape \[10, 6\], expected \[12, 6\]"):
        load_tensors(tmp_path, wrong)


_LOAD_WITHIN = """
import resource, sys
from pathlib import Path
import torch
from radixmesh.daemons.worker.checkpoint.loader import TensorTargets, load_tensors
torch.set_num_threads(1)
folder, num_tensors, rows = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
targets = {f"t{i}": torch.empty(rows, 1024) for i in range(num_tensors)}
# All libraries are loaded, and their memory is in use.
torch.empty(8, 8, dtype=torch.bfloat16).to(torch.float32)
used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData")) * 1024
room = int(sys.argv[4])
resource.setrlimit(resource.RLIMIT_DATA, (used + room, used + room))
load_tensors(folder, TensorTargets(tensors=targets, is_ignored=lambda name: False))
print(float(sum(t.sum() for t in targets.values())))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of a process's data are Linux's")
def test_loading_takes_the_weights_and_one_tensor(tmp_path: Path) -> None:
    """Beside the memory of the weights, the process may take that of one tensor and of the file, which is mapped."""
    num_tensors, rows = 12, 4096
    tensor_bytes = rows * 1024 * 2
    save_file(
        {f"t{i}": torch.full((rows, 1024), i, dtype=torch.bfloat16) for i in range(num_tensors)},
        tmp_path / "model.safetensors",
    )

    # A tensor in float32 is as large as two in the file.
    room = num_tensors * tensor_bytes + 2 * tensor_bytes
    arguments = [str(tmp_path), str(num_tensors), str(rows), str(room)]
    done = subprocess.run(
        [sys.executable, "-c", _LOAD_WITHIN, *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout) == sum(range(num_tensors)) * rows * 1024


def test_progress_is_told_every_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[dict[str, object]] = []
    monkeypatch.setattr(
        load_progress, "_log", SimpleNamespace(info=lambda event, **fields: lines.append({"event": event, **fields}))
    )
    now = iter((0.0, 0.5, 2.0, 3.0, 4.5))
    progress = LoadProgress(400, clock=lambda: next(now))
    for _ in range(4):
        progress.read(100)
    assert [(line["event"], line["bytes"], line["percent"], line["bytes_per_s"]) for line in lines] == [
        ("weights_loading", 200, 50, 100),
        ("weights_loading", 400, 100, 80),
    ]
    assert lines[0]["total_bytes"] == 400 and lines[1]["seconds"] == 4.5
