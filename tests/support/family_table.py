"""The table of families in docs/models.md: computed from the code and tiny models, and read back from the page.

`PYTHONPATH=tests python -m support.family_table` measures and writes it anew.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.worker.checkpoint.config_reader import ConfigReader
from radixmesh.daemons.worker.cpu import load_cpu_runner
from radixmesh.daemons.worker.cpu.runner import CpuRunner
from radixmesh.daemons.worker.cuda.weights.loading import check_model
from radixmesh.daemons.worker.models import registry
from radixmesh.daemons.worker.models.model import Placement
from radixmesh.daemons.worker.ranks.group import LocalGroup

from .deepseek_folders import random_deepseek
from .family_folders import FAMILIES, family_model
from .model_folders import SHAPES, random_model
from .segments import Stream, generate, scattered_pages

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
_MODELS = Path(registry.__file__).parent
_HEAD = (
    "| `architectures` | folder | lines | CPU | GPU | transformers' modules | logits | equal ids of 64 |\n"
    "|---|---|---|---|---|---|---|---|\n"
)
_BEGIN, _END = "<!-- families: written by tests/support/family_table.py -->\n", "<!-- end of families -->\n"
NUM_IDS, _PROMPT = 64, 24
_ROW = re.compile(
    r"^\| `(\w+)` \| `(\w+)/` \| (\d+) \| (\w+) \| (\w+) \| (\w+) \| ([\de.-]+) \| (\d+) \|$", re.MULTILINE
)


class Row(NamedTuple):
    """lines: of the family's own folder. cpu, gpu, fallback: "yes" or "no". difference: the largest of logits that
    was measured against transformers in float32. equal_ids: of the first greedy ids, how many are transformers' too."""

    architecture: str
    folder: str
    lines: int
    cpu: str
    gpu: str
    fallback: str
    difference: float
    equal_ids: int


def examples() -> dict[str, Callable[[], PreTrainedModel]]:
    """A tiny model of each architecture that generates, by architecture."""
    made: dict[str, Callable[[], PreTrainedModel]] = {}
    for shape in SHAPES:
        made.setdefault(SHAPES[shape].model.__name__, lambda shape=shape: random_model(shape))
    made["DeepseekV2ForCausalLM"] = lambda: random_deepseek("v2_greedy")
    made["DeepseekV3ForCausalLM"] = lambda: random_deepseek("v3_groups")
    for name, family in FAMILIES.items():
        made.setdefault(family.architecture, lambda name=name: family_model(name))
    return made


def rows_of_page() -> dict[str, Row]:
    text = PAGE.read_text()
    table = text[text.index(_BEGIN) : text.index(_END)]
    found = [Row(a, b, int(c), *more, float(d), int(e)) for a, b, c, *more, d, e in _ROW.findall(table)]
    assert len(found) == table.count("\n") - 3, "a line of the table has another form"
    return {row.architecture: row for row in found}


def folders() -> dict[str, str]:
    """Of each architecture."""
    names: dict[str, str] = {}
    for path in _MODELS.glob("*/__init__.py"):
        for architecture in re.findall(r'"(\w+For\w+|\w+LMHeadModel)"', path.read_text()):
            names[architecture] = path.parent.name
    return names


def num_lines(folder: str) -> int:
    return sum(len(path.read_text().splitlines()) for path in (_MODELS / folder).glob("*.py"))


def runs_on_gpu(folder: Path) -> str:
    """By the check that the cuda backend makes of a config."""
    try:
        check_on_gpu(folder)
    except MeshError:
        return "no"
    return "yes"


def check_on_gpu(folder: Path) -> None:
    """Raises MeshError UNSUPPORTED where the cuda backend refuses the model."""
    reader = ConfigReader.open(folder)
    placement = Placement(device=torch.device("cpu"), dtype=torch.float32, group=LocalGroup())
    architecture = reader.strings("architectures")[0]
    check_model(architecture, registry.model_families().create(architecture).build(reader, placement).model, form=None)


def runs_by_transformers(folder: Path) -> str:
    try:
        load_cpu_runner(folder, num_pages=8, threads=1, model_impl="transformers")
    except MeshError as error:
        assert error.reason_name == "UNSUPPORTED", error
        return "no"
    return "yes"


def _measured(model: PreTrainedModel, folder: Path) -> tuple[float, int]:
    """The largest difference of logits, and how many of the greedy ids are equal until the first that is not."""
    runner = load_cpu_runner(folder, num_pages=32, page_size=8, threads=1)
    assert isinstance(runner, CpuRunner)
    ids = np.random.default_rng(0).integers(0, runner.vocab_size, 90).astype(np.int32)
    stream = Stream(0, ids.tolist(), scattered_pages(runner, [90])[0])
    logits = runner.logits([stream.segment(90, 8, samples=False)])[0]
    with torch.inference_mode():
        difference = float(np.abs(logits - model(torch.from_numpy(ids).long()[None]).logits[0].numpy()).max())
        prompt = torch.from_numpy(ids[:_PROMPT]).long()[None]
        assert model.generation_config is not None
        model.generation_config.eos_token_id = None  # Both go on to the end.
        mask = torch.ones_like(prompt)
        expected = model.generate(prompt, attention_mask=mask, max_new_tokens=NUM_IDS, do_sample=False)
    expected = expected[0, _PROMPT:].tolist()
    runner.clear()
    answer = Stream(0, ids[:_PROMPT].tolist(), scattered_pages(runner, [_PROMPT + NUM_IDS])[0])
    generate(runner, [answer], NUM_IDS, chunk=11)
    is_equal = [a == b for a, b in zip(answer.output, expected, strict=True)]
    return difference, [*is_equal, False].index(False)


def _rows() -> Iterator[Row]:
    for architecture, make in examples().items():
        model = make()
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            model.save_pretrained(folder)
            ours = folders()[architecture]
            by_transformers, gpu = runs_by_transformers(folder), runs_on_gpu(folder)
            yield Row(architecture, ours, num_lines(ours), "yes", gpu, by_transformers, *_measured(model, folder))


def main() -> None:
    torch.set_num_threads(1)
    text = PAGE.read_text()
    lines = [
        f"| `{r.architecture}` | `{r.folder}/` | {r.lines} | {r.cpu} | {r.gpu} | {r.fallback} | {r.difference:.0e} "
        f"| {r.equal_ids} |"
        for r in _rows()
    ]
    table = _BEGIN + _HEAD + "".join(f"{line}\n" for line in lines)
    PAGE.write_text(text[: text.index(_BEGIN)] + table + text[text.index(_END) :])


if __name__ == "__main__":
    main()
