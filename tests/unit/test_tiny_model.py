"""The committed tiny models, loaded by transformers unmodified, recite what their manifest says."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DeepseekV3ForCausalLM,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

MODELS = Path(__file__).resolve().parents[2] / "compose" / "models"
FOLDER = MODELS / "tiny-llama"
NAME_TO_CLASS = {"tiny-llama": LlamaForCausalLM, "tiny-deepseek": DeepseekV3ForCausalLM}
MANIFEST = {item["name"]: item for item in json.loads((FOLDER / "recitations.json").read_text(encoding="utf-8"))}
TEXTS = sorted((MODELS / "texts").glob("*.txt"))
# One long text, one that is not ASCII, one asked for by its first line; and every chat.
RECITED = ["twelve-days", "lorelei", "jabberwocky.first-line"]
CHATS = [name for name, item in MANIFEST.items() if item["kind"] == "chat"]
# Float32 sums in another order differ by less than 1e-3 here.
SMALLEST_MARGIN = 3.0


class Oracle(NamedTuple):
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


@pytest.fixture(scope="module", params=NAME_TO_CLASS)
def oracle(request: pytest.FixtureRequest) -> Iterator[Oracle]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(MODELS / request.param)
    assert isinstance(model, NAME_TO_CLASS[request.param])
    assert model.dtype == torch.float32
    yield Oracle(model.eval(), AutoTokenizer.from_pretrained(MODELS / request.param))
    torch.set_num_threads(num_threads)


def test_manifest_has_both_forms_of_every_text_and_every_chat() -> None:
    chats = json.loads((MODELS / "chats.json").read_text(encoding="utf-8"))
    expected = {f"{path.stem}{form}" for path in TEXTS for form in ("", ".first-line")}
    assert set(MANIFEST) == expected | {f"chat.{chat['name']}" for chat in chats}


@pytest.mark.parametrize(
    "file", ["recitations.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"]
)
def test_all_models_were_taught_the_same(file: str) -> None:
    assert len({(MODELS / name / file).read_bytes() for name in NAME_TO_CLASS}) == 1


def test_the_deepseek_uses_all_of_its_experts() -> None:
    """A router that sends everything to a few would hide faults of the others."""
    model = AutoModelForCausalLM.from_pretrained(MODELS / "tiny-deepseek")
    ids = torch.tensor([MANIFEST["genesis-1"]["prompt_ids"] + MANIFEST["genesis-1"]["expected_ids"]])
    chosen: list[torch.Tensor] = []
    gates = [layer.mlp.gate for layer in model.model.layers[1:]]
    for gate in gates:
        gate.register_forward_hook(lambda gate, inputs, outputs: chosen.append(outputs[2]))
    with torch.inference_mode():
        model(ids)
    assert len(chosen) == len(gates) == 3
    for expert_ids_TA in chosen:
        share_E = torch.bincount(expert_ids_TA.flatten(), minlength=8) / expert_ids_TA.numel()
        assert share_E.min() > 0.04, share_E


@pytest.mark.parametrize("name", RECITED + CHATS)
def test_greedy_generate_recites_the_manifest(oracle: Oracle, name: str) -> None:
    item = MANIFEST[name]
    prompt_ids = _prompt_ids(oracle.tokenizer, item)
    assert prompt_ids == item["prompt_ids"]
    generated = oracle.model.generate(torch.tensor([prompt_ids]), max_new_tokens=len(item["expected_ids"]) + 8)
    generated_ids = generated[0, len(prompt_ids) :].tolist()
    assert generated_ids == item["expected_ids"]
    assert generated_ids[-1] in oracle.model.generation_config.eos_token_id
    assert oracle.tokenizer.decode(generated_ids[:-1]) == item["expected"]


@pytest.mark.parametrize("name", sorted(MANIFEST))
def test_every_argmax_is_clear(oracle: Oracle, name: str) -> None:
    item = MANIFEST[name]
    with torch.inference_mode():
        logits_LV = oracle.model(torch.tensor([item["prompt_ids"] + item["expected_ids"]])).logits[0]
    logits_TV = logits_LV[len(item["prompt_ids"]) - 1 : -1]
    top2_T2 = logits_TV.topk(2)
    assert top2_T2.indices[:, 0].tolist() == item["expected_ids"]
    assert (top2_T2.values[:, 0] - top2_T2.values[:, 1]).min().item() > SMALLEST_MARGIN


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_tokenizer_round_trips_text(oracle: Oracle, path: Path) -> None:
    text = path.read_text(encoding="utf-8").strip()
    ids = oracle.tokenizer.encode(text)
    assert ids[0] == oracle.tokenizer.bos_token_id
    assert oracle.tokenizer.decode(ids[1:]) == text
    title, body = text.split("\n\n", 1)
    assert MANIFEST[path.stem]["prompt"] == title
    assert MANIFEST[path.stem]["expected"] == "\n\n" + body


@pytest.mark.parametrize("name", ["chat.hello-japanese", "chat.emoji", "furu-ike", "jing-ye-si"])
def test_characters_are_split_across_tokens(oracle: Oracle, name: str) -> None:
    alone = [oracle.tokenizer.decode([token_id]) for token_id in MANIFEST[name]["expected_ids"][:-1]]
    assert sum("\N{REPLACEMENT CHARACTER}" in text for text in alone) >= 8


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_texts_are_free_of_characters_that_editors_change(path: Path) -> None:
    data = path.read_bytes()
    assert data.endswith(b"\n") and not data.endswith(b"\n\n")
    assert b"\r" not in data and b"\t" not in data and b" \n" not in data


def test_chat_template_rejects_unknown_roles(oracle: Oracle) -> None:
    with pytest.raises(Exception, match="system, user and assistant, not tool"):
        oracle.tokenizer.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)


def _prompt_ids(tokenizer: PreTrainedTokenizerBase, item: dict[str, object]) -> list[int]:
    if item["kind"] == "text":
        return tokenizer.encode(item["prompt"])
    rendered = tokenizer.apply_chat_template(item["messages"], tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(rendered, add_special_tokens=False)
