"""Seconds from `radixmesh serve FOLDER` to the first answer, for folders that transformers' save_pretrained wrote.

    python bench/gpu/serve.py --gpu cuda --runs 2 > bench/results/h200-serve.json

Small models with random weights: of families with code here (llama, qwen3), and of one that only transformers' modules
run (starcoder2; on the CPU, also of a machine with a GPU). healthy_s: until serve prints the URL. first_answer_s: until
the chat request that it prints has its answer. largest_gap: of the ids of a greedy answer, how far the logit of one lay
below the best, computed by transformers in float32 on the same weights; zero if every id is transformers' own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import transformers
from gpu.mesh import gpu_name
from transformers import AutoTokenizer, PreTrainedModel

TOKENIZER = Path(__file__).parents[2] / "compose/models/tiny-llama"
FAMILIES = {"llama": "Llama", "qwen3": "Qwen3", "starcoder2": "Starcoder2"}
_WITHOUT_CODE_HERE = "starcoder2"
_DEADLINE_S = 240.0
_NUM_TOKENS = 32
_PROMPT = "The Tyger"
# Random weights large enough for one likeliest token, by a clear margin.
_STD = 0.2
_SIZES = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
_SIZES |= {"intermediate_size": 512, "max_position_embeddings": 2048}


def save_model(name: str, folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Writes model and tokenizer; the model in float32, of weights that `dtype` holds exactly."""
    torch.manual_seed(7)
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    more = {"head_dim": 64} if name == "qwen3" else {}
    config = getattr(transformers, f"{FAMILIES[name]}Config")(
        **_SIZES,
        **more,
        initializer_range=_STD,
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = getattr(transformers, f"{FAMILIES[name]}ForCausalLM")(config).to(dtype)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.float().eval()


def serve_once(folder: Path, gpu: str, ids: list[int]) -> tuple[dict[str, float], list[int]]:
    """The times, and the ids of a greedy answer to `ids`."""
    port, grpc_port = _free_port(), _free_port()
    flags = ["--gpu", gpu, "--port", str(port), "--grpc-port", str(grpc_port)]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as work, (Path(work) / "output").open("w+") as output:
        command = [*(sys.executable, "-m", "radixmesh.cli", "serve", str(folder)), *flags]
        environment = {**os.environ, "NO_COLOR": "1"}
        started = time.monotonic()
        process = subprocess.Popen(command, cwd=work, stdout=output, stderr=output, env=environment)
        try:
            while f"served at {url}" not in (text := Path(output.name).read_text()):
                if process.poll() is not None or time.monotonic() - started > _DEADLINE_S:
                    raise RuntimeError(text[-4000:])
                time.sleep(0.02)
            healthy = time.monotonic() - started
            chat = {"model": folder.name, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": _NUM_TOKENS}
            answer = _post(f"{url}/v1/chat/completions", chat)
            answered = time.monotonic() - started
            assert answer["usage"]["completion_tokens"] > 0, answer
            sampling = {"max_new_tokens": _NUM_TOKENS, "temperature": 0, "ignore_eos": True}
            whole = _post(f"{url}/generate", {"model": folder.name, "input_ids": ids, "sampling_params": sampling})
            got = whole.get("output_ids") or whole["meta_info"]["output_ids"]
            return {"healthy_s": round(healthy, 2), "first_answer_s": round(answered, 2)}, got
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            finally:
                process.kill()
                process.wait()


def largest_gap(model: PreTrainedModel, ids: list[int], got: list[int]) -> float:
    with torch.inference_mode():
        logits = model(torch.tensor([ids + got[:-1]])).logits[0, len(ids) - 1 :]
    chosen = logits[torch.arange(len(got)), torch.tensor(got)]
    return float((logits.max(-1).values - chosen).max())


def _post(url: str, body: dict[str, object]) -> dict[str, object]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=_DEADLINE_S) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{url}: {error.code} {error.read().decode(errors='replace')}") from error


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _machine(gpu: str) -> str:
    if gpu == "cuda":
        return f"{gpu_name()}, {os.cpu_count()} cores"
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return (
        f"{os.cpu_count()} x {next(line for line in lines if line.startswith('model name')).split(':', 1)[1].strip()}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--families", nargs="+", choices=tuple(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--runs", type=int, default=2)
    args = parser.parse_args()
    ids = AutoTokenizer.from_pretrained(TOKENIZER)(_PROMPT).input_ids
    results = []
    with tempfile.TemporaryDirectory() as root:
        for name in args.families:
            gpu = "auto" if name == _WITHOUT_CODE_HERE else args.gpu
            dtype = torch.bfloat16 if gpu == "cuda" else torch.float32
            model = save_model(name, Path(root) / name, dtype)
            runs = []
            for _ in range(args.runs):
                times, got = serve_once(Path(root) / name, gpu, ids)
                runs.append({**times, "largest_gap": round(largest_gap(model, ids, got), 4)})
                assert len(got) == _NUM_TOKENS, got
            command = f"radixmesh serve ./{name} --gpu {gpu}"
            results.append({"family": name, "command": command, "runs": runs})
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    output = {
        "command": " ".join(["python", *sys.argv]),
        "machine": _machine(args.gpu),
        "load_average": round(os.getloadavg()[0], 1),
        "versions": {**versions, "transformers": transformers.__version__},
        "families": results,
    }
    print(json.dumps(output, indent=1))


if __name__ == "__main__":
    main()
