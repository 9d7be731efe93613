"""Speed of decodes that a network drafts for, of the worker alone, at acceptances that are forced.

    python bench/gpu/draft_networks.py --network eagle3 --shape llama-3.1-8b > bench/results/h200-eagle3.json
    python bench/gpu/draft_networks.py --network mtp --shape deepseek-v2-lite > bench/results/h200-mtp.json
    python bench/gpu/draft_networks.py --network eagle3 --topk 4 --levels 4 --drafts 7 > bench/results/h200-trees.json

As bench/gpu/speculation.py, with random weights of target and network. The network computes its drafts in each step,
and then they are overwritten: right with the probability `acceptance`, each position by itself. The head of EAGLE-3 has
the sizes of the published ones for that shape: a layer of the target's, 32,000 ids. ms is of a step that drafts and
verifies; plain_ms of one that does neither; ngram_ms of one that verifies as many drafts that cost nearly nothing.

--topk: trees of --levels levels, whose drafts are overwritten too: a path with a draft of each level, each right with
that probability, behind drafts that all follow the last token and are wrong. So the KV of what is accepted moves.
--results: file of what is known so far, after each case.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
import triton
from gpu.kept import Kept
from gpu.mesh import gpu_name
from gpu.shapes import SHAPES
from gpu.speculation import SpeculationBench
from gpu.verify import verifying_runner
from safetensors.torch import save_file

from radixmesh.daemons.worker.cuda.runner import DeviceRunner
from radixmesh.daemons.worker.speculation.adaptive import DraftLengths
from radixmesh.daemons.worker.speculation.drafter import MOST_BEHIND, Drafter
from radixmesh.daemons.worker.speculation.ngram import NgramDrafter
from radixmesh.daemons.worker.speculation.settings import Speculation, SpeculativeAlgorithm
from radixmesh.kernels.sampling.drafts import DraftInputs, SlotLengths

_HEAD_IDS = 32_000
_POSITIONS = 1 << 16


def prepare(network: str, shape: str, head: Path, folder: Path) -> None:
    """Writes what the target's folder lacks for the network, or the folder of a head."""
    sizes = SHAPES[shape]
    if network == "eagle3":
        head.mkdir()
        config = {**sizes, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}
        config |= {"draft_vocab_size": _HEAD_IDS, "tie_word_embeddings": False}
        layers = int(str(sizes["num_hidden_layers"]))
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, layers // 2 - 1, layers - 4]}
        (head / "config.json").write_text(json.dumps(config))
    else:
        (folder / "config.json").write_text(json.dumps({**sizes, "num_nextn_predict_layers": 1}))
        # Weights are random; the name alone tells that the checkpoint has the layer.
        name = f"model.layers.{sizes['num_hidden_layers']}.enorm.weight"
        save_file({name: torch.zeros(1)}, folder / "model.safetensors")


def forced(runner: DeviceRunner, acceptance: float, levels: int) -> Drafter:
    """The runner's network, whose drafts are then overwritten: id 0 is right. levels: of trees; 0: chains."""
    drafter = runner.network_drafter
    network = drafter.on_device()
    assert network is not None
    is_wrong = torch.from_numpy((np.random.default_rng(0).random(_POSITIONS) >= acceptance).astype(np.int32)).cuda()
    propose = type(network).propose

    def overwriting(inputs: DraftInputs, state: SlotLengths) -> None:
        propose(network, inputs, state)
        window_WB = inputs.window_WB[:, : len(inputs.slots)]
        numbers = torch.arange(len(window_WB), device=window_WB.device)[:, None]
        # Of a tree: the wrong drafts before the path.
        before = len(window_WB) - levels if levels else 0
        depths = (numbers - before).clamp(min=0)
        window_WB.copy_(is_wrong[(inputs.starts[None].long() + depths) % _POSITIONS])
        if levels:
            window_WB.masked_fill_(numbers < before, 1)
            assert inputs.parents_WB is not None
            parents_W1 = torch.where(numbers > before, numbers, 0).int()
            inputs.parents_WB[: len(window_WB), : len(inputs.slots)].copy_(parents_W1.expand_as(window_WB))

    network.propose = overwriting  # type: ignore[method-assign]
    return drafter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=("eagle3", "mtp"), default="eagle3")
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 64, 256])
    parser.add_argument("--acceptances", type=float, nargs="*", default=[0.7, 0.0])
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--topk", type=int, default=1)
    parser.add_argument("--levels", type=int, default=4, help="of trees")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--results", type=Path, default=None, metavar="FILE")
    args = parser.parse_args()
    with Kept(args.results) as kept, tempfile.TemporaryDirectory() as folder:
        measure(args, kept, Path(folder) / "head")


def measure(args: argparse.Namespace, kept: Kept, head: Path) -> None:
    """head: folder that is made where the network has one of its own."""
    kept.note(
        command=" ".join(["python", *sys.argv]),
        machine=f"{gpu_name()}, {os.cpu_count()} cores",
        versions={"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__},
        shape=args.shape,
        context=args.context,
    )
    algorithm = SpeculativeAlgorithm(args.network)
    folder = head if args.network == "eagle3" else None
    levels = args.levels if args.topk > 1 else 0
    speculation = Speculation(
        algorithm=algorithm, max_drafts=args.drafts, draft_model=folder, topk=args.topk, levels=levels
    )
    runner = verifying_runner(
        args.shape, max(args.rows), args.drafts, speculation, partial(prepare, args.network, args.shape, head)
    )
    with torch.inference_mode():
        runner.model._head._w_NK.zero_()
    bench = SpeculationBench(runner, num_slots=max(args.rows))
    bench.decode(1, 200, 50)
    plain = {rows: rows / bench.decode(rows, args.context + args.tokens // 2, args.tokens)[0] for rows in args.rows}
    rows_of_graphs = tuple(sorted(args.rows))
    runner.verify(NgramDrafter(), max_drafts=args.drafts, graph_rows=rows_of_graphs)
    ngram = {rows: bench.stream(rows, args.context, args.tokens, args.drafts)["ms"] for rows in args.rows}
    results = []
    for acceptance, is_adaptive in [*((share, False) for share in args.acceptances), (0.0, True)]:
        lengths = DraftLengths(max(args.rows), args.drafts, catch_up=MOST_BEHIND) if is_adaptive else None
        drafter = forced(runner, acceptance, levels)
        runner.verify(drafter, max_drafts=args.drafts, graph_rows=rows_of_graphs, lengths=lengths)
        for rows in args.rows:
            got = bench.stream(rows, args.context, args.tokens, args.drafts)
            speeds = {
                "plain_ms": round(rows / plain[rows] * 1e3, 3),
                "ngram_ms": ngram[rows],
                "plain_tokens_per_s": round(plain[rows], 1),
                "speed_up": round(got["tokens_per_s"] / plain[rows], 3),
            }
            case = {"network": args.network, "acceptance": acceptance, "is_adaptive": is_adaptive, "rows": rows}
            results.append({**case, "drafts": args.drafts, "topk": args.topk, "levels": levels, **got, **speeds})
            kept.note(results=results)
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
