"""`radixmesh serve` before anything is started: where the model comes from, and whether it can be served here."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.fake_hub import fake_hub

from radixmesh.cli import serve
from radixmesh.cli.serve.model_check import CheckedModel, ModelCheckError, check_model, choose_cpu_dtype
from radixmesh.cli.serve.model_source import ModelSourceError, find_model_folder, served_name
from radixmesh.daemons.cluster.compose.compose import DependencyCondition
from radixmesh.daemons.cluster.compose.reader import read_compose
from radixmesh.daemons.router.requests.intake.model_aliases import ModelAliases
from radixmesh.daemons.runtime.settings import load_settings
from radixmesh.daemons.worker.config import WorkerSettings

TINY = Path(__file__).parents[2] / "compose/models/tiny-llama"
GIB = 1 << 30


def _folder(path: Path, architecture: str = "LlamaForCausalLM", *files: str) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"architectures": [architecture], "vocab_size": 8}))
    for name in files:
        (path / name).write_bytes(b"{}")
    return path


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    assert find_model_folder(str(TINY), revision=None, say=pytest.fail) == TINY
    assert served_name(str(TINY)) == served_name(f"{TINY}/") == "tiny-llama"
    (tmp_path / "mine").symlink_to(TINY)
    assert served_name(str(tmp_path / "mine")) == "mine"
    assert served_name("org/name") == "org/name"


@pytest.mark.parametrize("named", ["/no/such/folder", "./nowhere", "justaname", "a/b/c"])
def test_what_is_neither_folder_nor_hub_name_is_said(named: str) -> None:
    with pytest.raises(ModelSourceError, match="no folder here"):
        find_model_folder(named, revision=None, say=pytest.fail)


def test_a_file_is_no_folder() -> None:
    with pytest.raises(ModelSourceError, match="is a file"):
        find_model_folder(str(TINY / "config.json"), revision=None, say=pytest.fail)


def test_the_tiny_model_can_be_served() -> None:
    assert check_model(TINY).architecture == "LlamaForCausalLM"


def test_a_model_is_checked_without_torch() -> None:
    """Importing it takes seconds, in which nothing would be started."""
    program = (
        "import sys, pathlib; from radixmesh.cli.serve.model_check import check_model; "
        f"check_model(pathlib.Path({str(TINY)!r})); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"


def test_daemons_start_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waited for a healthy worker would begin its imports when everything else is over."""
    for name in ("FOLDER", "WORKER", "WORKERS", "ROUTER", "PORT", "GRPC_PORT"):
        monkeypatch.setenv(f"RADIXMESH_SERVE_{name}", "1")
    compose = read_compose([serve.COMPOSE_FILE, serve.RANKS_FILE], dict(os.environ))
    waits = [one for service in compose.services.values() for one in service.depends_on]
    assert len(waits) > 4 and all(one.condition is DependencyCondition.STARTED for one in waits)


def test_an_unknown_family_names_the_nearest(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "m", "Qwen4ForCausalLM")
    words = r"Qwen4ForCausalLM is not supported.*transformers \d.*a newer one may.*nearest that is: Qwen3ForCausalLM"
    with pytest.raises(ModelCheckError, match=words):
        check_model(folder)


def test_nothing_is_near_to_a_family_because_of_the_names_common_end(tmp_path: Path) -> None:
    with pytest.raises(ModelCheckError) as raised:
        check_model(_folder(tmp_path / "m", "FooForCausalLM"))
    assert "nearest" not in str(raised.value)


@pytest.mark.parametrize(("architecture", "backend"), [("CohereForCausalLM", "cuda"), ("BertModel", "cpu")])
def test_models_go_to_the_gpu_but_for_encoders(
    architecture: str,
    backend: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A model that transformers alone knows is served like any other."""
    folder = _folder(tmp_path / "m", architecture, "tokenizer.json", "model.safetensors")
    assert check_model(folder).is_cpu_only == (backend == "cpu")
    for name in ("FOLDER", "WORKER", "ROUTER", "PORT", "GRPC_PORT"):
        monkeypatch.setenv(f"RADIXMESH_SERVE_{name}", "")
    monkeypatch.setattr(serve, "count_gpus", lambda: 1)
    monkeypatch.setattr(serve.up, "run", lambda *args, **kwargs: 0)
    assert serve.run([str(folder), "--dtype", "float32"]) == 0
    assert f"--backend {backend}" in os.environ["RADIXMESH_SERVE_WORKER"]
    assert serve.run([str(folder), "--gpu", "cuda"]) == (2 if backend == "cpu" else 0)
    assert ("runs on a CPU only" in capsys.readouterr().out) == (backend == "cpu")


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelCheckError, match=r"config\.json is missing"):
        check_model(tmp_path)
    with pytest.raises(ModelCheckError, match=r"has no tokenizer\.json"):
        check_model(_folder(tmp_path / "a"))
    with pytest.raises(ModelCheckError, match=r"only pytorch_model\.bin"):
        check_model(_folder(tmp_path / "b", "LlamaForCausalLM", "tokenizer.json", "pytorch_model.bin"))


def test_weights_are_narrowed_before_they_are_refused() -> None:
    model = CheckedModel(architecture="LlamaForCausalLM", weights_bytes=4 * GIB)
    assert choose_cpu_dtype(model, 9 * GIB) == "float32"
    assert choose_cpu_dtype(model, 6 * GIB) == "bfloat16"
    with pytest.raises(ModelCheckError, match=r"4\.0 GiB and 4\.5 GiB of memory are free"):
        choose_cpu_dtype(model, int(4.5 * GIB))


@pytest.mark.parametrize(
    ("flags", "message"), [(["--tp", "9"], "choose 1 to 8"), (["--gpu", "cuda"], "no NVIDIA GPU here")]
)
def test_what_this_machine_cannot_do_is_usage(
    flags: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "count_gpus", lambda: 0)
    assert serve.run([str(TINY), *flags]) == 2
    assert message in capsys.readouterr().out


def test_ranks_have_a_gpu_each(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("FOLDER", "WORKER", "WORKERS", "ROUTER", "PORT", "GRPC_PORT"):
        monkeypatch.setenv(f"RADIXMESH_SERVE_{name}", "")
    monkeypatch.setattr(serve.up, "run", lambda *args, **kwargs: 0)
    monkeypatch.setattr(serve, "count_gpus", lambda: 2)
    assert serve.run([str(TINY), "--tp", "2"]) == 0
    assert "--backend cuda" in os.environ["RADIXMESH_SERVE_WORKER"]
    assert "--tp-size 2" in os.environ["RADIXMESH_SERVE_WORKER"]
    ranks = yaml.safe_load((Path(serve.__file__).with_name("serve_ranks.yml")).read_text())["services"]
    for rank in range(1, 8):
        environment = ranks[f"worker-rank-{rank}"]["environment"]
        assert environment["RADIXMESH_CUDA_DEVICE"] == environment["RADIXMESH_TP_RANK"] == rank
    assert serve.run([str(TINY), "--tp", "3"]) == 2
    assert "this machine has 2 GPUs" in capsys.readouterr().out


@pytest.mark.parametrize("is_read", [True, False])
def test_the_models_own_sampling_is_left_by_flag(
    is_read: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The worker that the compose file names takes the flag as its own."""
    for name in ("FOLDER", "WORKER", "ROUTER", "PORT", "GRPC_PORT"):
        monkeypatch.setenv(f"RADIXMESH_SERVE_{name}", "")
    monkeypatch.setattr(serve.up, "run", lambda *args, **kwargs: 0)
    assert serve.run([str(TINY), "--gpu", "cpu", *([] if is_read else ["--no-generation-config"])]) == 0
    command = shlex.split(os.environ["RADIXMESH_SERVE_WORKER"])
    assert command[:2] == ["radixmesh", "worker"]
    assert load_settings(WorkerSettings, command[2:], "radixmesh worker", {}).generation_config is is_read


def test_a_model_of_the_hub_is_fetched_and_then_cached(tmp_path: Path) -> None:
    with fake_hub({"org/tiny": TINY}) as endpoint:
        folder = _find_in_a_process("org/tiny", endpoint, tmp_path)
        assert (folder / "config.json").read_bytes() == (TINY / "config.json").read_bytes()
        assert {file.name for file in folder.glob("*.safetensors")} == {
            file.name for file in TINY.glob("*.safetensors")
        }
        assert "the hub has no org/other" in _error_of_a_process("org/other", endpoint, tmp_path)
    # The hub is gone; the cache is not.
    assert _find_in_a_process("org/tiny", endpoint, tmp_path) == folder


def test_a_hub_out_of_reach_is_said(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # Not listening: every connection is refused.
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        assert "the hub cannot be reached" in _error_of_a_process("org/tiny", endpoint, tmp_path)


_PROGRAM = """
import sys
from radixmesh.cli.serve.model_source import ModelSourceError, find_model_folder
try:
    print(find_model_folder(sys.argv[1], revision=None, say=lambda line: None))
except ModelSourceError as error:
    sys.exit(f"refused: {error}")
"""


def _run(name: str, endpoint: str, home: Path) -> subprocess.CompletedProcess[str]:
    # huggingface_hub reads its variables when it is imported.
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    return subprocess.run(
        [sys.executable, "-c", _PROGRAM, name], env=environment, capture_output=True, text=True, timeout=120
    )


def _find_in_a_process(name: str, endpoint: str, home: Path) -> Path:
    done = _run(name, endpoint, home)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip().splitlines()[-1])


def _error_of_a_process(name: str, endpoint: str, home: Path) -> str:
    done = _run(name, endpoint, home)
    assert done.returncode == 1 and "refused: " in done.stderr, done.stderr
    return done.stderr


def test_aliases_lead_to_the_models_own_name() -> None:
    aliases = ModelAliases.parse(["gpt=mine", "default=mine"])
    assert [aliases.resolve(name) for name in ("gpt", "mine", "other", "")] == ["mine", "mine", "other", ""]
    assert aliases.of("mine") == ["gpt", "default"]
    for wrong in (["gpt"], ["=mine"], ["gpt="], ["a=b", "a=c"]):
        with pytest.raises(ValueError, match="--model-aliases"):
            ModelAliases.parse(wrong)
