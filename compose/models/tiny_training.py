"""Shared by the scripts that train the tiny models: tokenizer, items to memorise, training, manifest, verification.

A model memorises the texts in ``texts/`` and the answers in ``chats.json`` until greedy decoding repeats them word
for word and then stops. That makes it a detector: a wrong page, position, mask or batch row shows as a broken
recitation. Several items are chosen so that the next token cannot be told from the last few ones:

* the cumulative verses of "The Twelve Days of Christmas" and the refrains of Genesis need tokens far back;
* ``tyger-for-ada`` and ``tyger-for-alan`` differ in one name in the first turn, which decides how a recitation ends;
* CJK, emoji and accented letters are split across tokens, so that detokenisation has to wait for whole characters.

Training aims at a probability of 1 - LABEL_SMOOTHING, not 1. Greedy decoding is exact with a logit margin (target minus
best other, printed per item) that no other order of summation can flip, and yet sampling at temperature 1 leaves the
text every few dozen tokens, so that tests of sampling have something to see.

Output folder (Hugging Face format, loaded by transformers unmodified): config.json, generation_config.json,
model.safetensors (float32), tokenizer.json, tokenizer_config.json, special_tokens_map.json and recitations.json, the
manifest: name, kind, prompt or messages, expected text, and the ids of both (expected_ids ends with the stop token).
"""

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

HERE = Path(__file__).resolve().parent
BOS, EOS, SYSTEM, USER, ASSISTANT, END_OF_TURN = SPECIAL_TOKENS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end_of_turn|>",
)
CHAT_TEMPLATE = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{- raise_exception('the roles are system, user and assistant, not ' + message['role']) }}"
    "{%- endif %}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end_of_turn|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)
VOCAB_SIZE = 768
SEED = 20260
TOKENS_PER_BATCH = 2048
PEAK_LR = 4e-3
LABEL_SMOOTHING = 0.03
IGNORED = -100  # cross_entropy's ignore_index
MAX_TOTAL_LEN = 2048
BOS_ID, EOS_ID, END_OF_TURN_ID = (SPECIAL_TOKENS.index(token) for token in (BOS, EOS, END_OF_TURN))

AfterStep = Callable[[PreTrainedModel, float], None]
"""Called after every step of the optimizer with the learning rate's share of its peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recitation:
    """One memorised item: what is asked and what greedy decoding must answer.

    ``expected_ids`` ends with the stop token; ``expected`` is its text without it.
    """

    name: str
    kind: str  # "text": prompt is encoded with a BOS in front; "chat": messages go through the chat template
    prompt: str | None
    messages: list[dict[str, str]] | None
    expected: str
    prompt_ids: list[int]
    expected_ids: list[int]

    def manifest_entry(self) -> dict[str, object]:
        asked = {"prompt": self.prompt} if self.messages is None else {"messages": self.messages}
        return {
            "name": self.name,
            "kind": self.kind,
            **asked,
            "expected": self.expected,
            "prompt_ids": self.prompt_ids,
            "expected_ids": self.expected_ids,
        }


def make_tiny_model(
    name: str,
    config: Mapping[str, object],
    create: Callable[[], PreTrainedModel],
    *,
    epochs: int,
    after_step: AfterStep | None = None,
) -> None:
    """The command line of a training script: trains what `create` makes, writes its folder and verifies it.

    `config` is written as config.json; `epochs` is the default of a flag. Raises SystemExit if an item is not recited.
    """
    parser = argparse.ArgumentParser(description=f"train {name}")
    parser.add_argument("--out", type=Path, default=HERE / name)
    parser.add_argument("--epochs", type=int, default=epochs, help="passes over everything there is to memorise")
    args = parser.parse_args()

    started = time.monotonic()
    torch.set_num_threads(2)
    torch.manual_seed(SEED)
    texts = {path.stem: path.read_text(encoding="utf-8").strip() for path in sorted((HERE / "texts").glob("*.txt"))}
    args.out.mkdir(parents=True, exist_ok=True)
    _save_tokenizer(_train_tokenizer(list(texts.values())), args.out)
    recitations = _build_recitations(args.out, texts)
    print(f"{len(recitations)} items, longest {max(map(_length, recitations))} tokens", flush=True)

    model = create()
    print(f"{sum(p.numel() for p in model.parameters())} parameters", flush=True)
    _train(model, recitations, epochs=args.epochs, after_step=after_step)
    _save_model(model, config, args.out)
    _save_manifest(recitations, args.out)
    print(f"trained and saved after {time.monotonic() - started:.0f} s", flush=True)

    _verify(args.out, recitations)
    print(f"verified after {time.monotonic() - started:.0f} s", flush=True)


def _train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE without normalisation; adds a BOS in front when special tokens are asked for.

    The chats are left out on purpose: their emoji and CJK then stay split into bytes.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            min_frequency=2,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, tokenizer.get_vocab_size()
    bos_id = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, bos_id)]
    )
    return tokenizer


def _save_tokenizer(tokenizer: Tokenizer, out: Path) -> None:
    """The files are written by hand because save_pretrained puts the chat template into a file of its own."""
    tokenizer.save(str(out / "tokenizer.json"))
    specials = {"bos_token": BOS, "eos_token": EOS, "pad_token": EOS}
    _write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **specials,
            "additional_special_tokens": [SYSTEM, USER, ASSISTANT, END_OF_TURN],
            "clean_up_tokenization_spaces": False,
            "model_max_length": MAX_TOTAL_LEN,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    _write_json(
        out / "special_tokens_map.json",
        {**specials, "additional_special_tokens": [SYSTEM, USER, ASSISTANT, END_OF_TURN]},
    )


def _build_recitations(folder: Path, texts: dict[str, str]) -> list[Recitation]:
    """Each text twice (from its title, and from its first line without title), then every chat answer."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    eos_id, end_of_turn_id = tokenizer.convert_tokens_to_ids([EOS, END_OF_TURN])
    recitations = []
    for stem, text in texts.items():
        title, body = text.split("\n\n", 1)
        first_line, rest = body.split("\n", 1)
        for name, prompt, expected in (
            (stem, title, "\n\n" + body),
            (stem + ".first-line", first_line, "\n" + rest),
        ):
            prompt_ids = tokenizer.encode(prompt)
            expected_ids = tokenizer.encode(expected, add_special_tokens=False)
            # A prompt that ended inside a token would ask for a different split than the one that is memorised.
            assert tokenizer.encode(prompt + expected) == prompt_ids + expected_ids, name
            recitations.append(
                Recitation(
                    name=name,
                    kind="text",
                    prompt=prompt,
                    messages=None,
                    expected=expected,
                    prompt_ids=prompt_ids,
                    expected_ids=[*expected_ids, eos_id],
                )
            )
    for chat in json.loads((HERE / "chats.json").read_text(encoding="utf-8")):
        expected = texts.get(chat.get("answer_text"), "") + chat["answer"]
        rendered = tokenizer.apply_chat_template(chat["messages"], tokenize=False, add_generation_prompt=True)
        recitations.append(
            Recitation(
                name="chat." + chat["name"],
                kind="chat",
                prompt=None,
                messages=chat["messages"],
                expected=expected,
                prompt_ids=tokenizer.encode(rendered, add_special_tokens=False),
                expected_ids=[*tokenizer.encode(expected, add_special_tokens=False), end_of_turn_id],
            )
        )
    return recitations


def _train(
    model: PreTrainedModel, recitations: Sequence[Recitation], *, epochs: int, after_step: AfterStep | None
) -> None:
    """AdamW with a linear warm-up and a cosine to zero; only target tokens are learned, the asked ones are context."""
    batches = list(_batches(recitations))
    num_targets = sum(len(r.expected_ids) for r in recitations)
    num_steps = epochs * len(batches)
    num_warmup = num_steps // 30
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.01)
    order = random.Random(SEED)
    model.train()
    step = 0
    for epoch in range(epochs):
        total = 0.0
        for tokens_BL, labels_BL in order.sample(batches, len(batches)):
            step += 1
            progress = (step - num_warmup) / (num_steps - num_warmup)
            scale = step / num_warmup if step <= num_warmup else 0.5 * (1 + math.cos(math.pi * progress))
            for group in optimizer.param_groups:
                group["lr"] = PEAK_LR * scale
            logits_BLV = model(input_ids=tokens_BL, use_cache=False).logits
            loss = functional.cross_entropy(
                logits_BLV.flatten(0, 1),
                labels_BL.flatten(),
                ignore_index=IGNORED,
                reduction="sum",
                label_smoothing=LABEL_SMOOTHING,
            )
            total += loss.item()
            optimizer.zero_grad(set_to_none=True)
            # The same divisor for every batch: a token weighs the same whatever it is batched with.
            (loss * len(batches) / num_targets).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if after_step is not None:
                after_step(model, scale)
        if epoch % 10 == 9:
            print(f"epoch {epoch + 1}/{epochs} loss {total / num_targets:.5f}", flush=True)
    model.eval()


def _batches(recitations: Sequence[Recitation]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Items of like length, right-padded to at most TOKENS_PER_BATCH: (tokens [B, L], labels [B, L]), int64.

    Padding needs no attention mask: it comes last, attention is causal, and its labels are ignored.
    """
    group: list[Recitation] = []
    for item in sorted(recitations, key=_length, reverse=True):
        if group and (len(group) + 1) * _length(group[0]) > TOKENS_PER_BATCH:
            yield _pad(group)
            group = []
        group.append(item)
    yield _pad(group)


def _pad(group: Sequence[Recitation]) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (len(group), max(map(_length, group)) - 1)
    tokens_BL = torch.zeros(shape, dtype=torch.int64)
    labels_BL = torch.full(shape, IGNORED, dtype=torch.int64)
    for row, item in enumerate(group):
        ids = torch.tensor(item.prompt_ids + item.expected_ids)
        tokens_BL[row, : len(ids) - 1] = ids[:-1]
        labels_BL[row, len(item.prompt_ids) - 1 : len(ids) - 1] = ids[len(item.prompt_ids) :]
    return tokens_BL, labels_BL


def _length(item: Recitation) -> int:
    return len(item.prompt_ids) + len(item.expected_ids)


def _save_model(model: PreTrainedModel, config: Mapping[str, object], out: Path) -> None:
    """config.json and generation_config.json in the form published checkpoints have."""
    model.save_pretrained(out)
    _write_json(out / "config.json", config)
    stops = [EOS_ID, END_OF_TURN_ID]
    _write_json(
        out / "generation_config.json",
        {"bos_token_id": BOS_ID, "eos_token_id": stops, "pad_token_id": stops[0], "do_sample": False},
    )


def _save_manifest(recitations: Sequence[Recitation], out: Path) -> None:
    lines = ",\n".join(json.dumps(r.manifest_entry(), ensure_ascii=False) for r in recitations)
    (out / "recitations.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


@torch.inference_mode()
def _verify(folder: Path, recitations: Sequence[Recitation]) -> None:
    """Reload with transformers, generate every item greedily and compare; print the margins. Raises if one differs."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    wrong = []
    for item in recitations:
        generated = model.generate(torch.tensor([item.prompt_ids]), max_new_tokens=len(item.expected_ids) + 8)
        ids = generated[0, len(item.prompt_ids) :].tolist()
        if ids != item.expected_ids or tokenizer.decode(ids, skip_special_tokens=True) != item.expected:
            wrong.append(item.name)
        margin, at = _smallest_margin(model, item)
        print(f"{item.name:32} {len(item.expected_ids):5} tokens, smallest margin {margin:6.2f} at {at}", flush=True)
    if wrong:
        raise SystemExit(f"not recited exactly: {', '.join(wrong)}; train for more epochs")


def _smallest_margin(model: PreTrainedModel, item: Recitation) -> tuple[float, int]:
    """(target logit minus best other logit, at its smallest over the expected tokens; the index of that token)."""
    logits_LV = model(torch.tensor([item.prompt_ids + item.expected_ids])).logits[0]
    logits_TV = logits_LV[len(item.prompt_ids) - 1 : -1]
    index_T1 = torch.tensor(item.expected_ids)[:, None]
    others_TV = logits_TV.scatter(1, index_T1, float("-inf"))
    margins_T = logits_TV.gather(1, index_T1)[:, 0] - others_TV.max(dim=1).values
    return margins_T.min().item(), int(margins_T.argmin())


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
