"""Tokenizers of every kind that the detokenizer knows, small enough to build in a test."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from radixmesh.daemons.runtime.model_folder.fingerprint import ModelIdentity
from radixmesh.daemons.runtime.model_folder.vocabulary import Vocabulary

# The byte-level alphabet: printable bytes are their own letter, the others U+0100 and up in order.
_PRINTABLE = {*range(33, 127), *range(161, 173), *range(174, 256)}
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_LETTERS = [chr(b) if b in _PRINTABLE else chr(256 + _OTHERS.index(b)) for b in range(256)]

TEXTS = (
    "It was the best of times, it was the worst of times.",
    "naïve café — “quoted” text… 日本語のテキスト, 中文, 한국어, русский",
    "emoji: 😀👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 a\u0308\n\n\t  stop STOP ###\r\n",
)
SPECIAL = ("<s>", "</s>", "<|user|>")


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 4, trainer)
    # Outside the alphabet (a space, a kanji) and inside it: added tokens are spelled in plain text.
    tokenizer.add_tokens([AddedToken("two words", normalized=False), "日本人"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Like the SentencePiece models of the Llama 2 family."""
    words = [
        "▁",
        "▁▁",
        "a",
        "b",
        "▁a",
        "▁the",
        "he",
        "llo",
        "▁hello",
        ".",
        ",",
        "日",
        "本",
        "s",
        "t",
        "o",
        "p",
        "\ufffd",
    ]
    tokenizer = Tokenizer(models.BPE(vocab=_vocab([*_BYTES, *words]), merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def metaspace() -> Tokenizer:
    words = ["▁", "▁▁", "a", "b", "▁a", "▁the", "he▁", "llo", "▁hello", ".", "日本"]
    tokenizer = Tokenizer(models.WordLevel(_vocab(words), unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def word_piece() -> Tokenizer:
    words = ["the", "best", "##ing", "##s", ".", ",", "!", "n't", "do", "not", "'s", "'", "##'", "日", "##本", "##"]
    tokenizer = Tokenizer(models.WordPiece(_vocab(words), unk_token="<unk>"))
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def word_end() -> Tokenizer:
    """BPE with </w> at the end of words: the last token's space shows only when another follows."""
    words = ["a", "b", "a</w>", "the</w>", "lo", "w</w>", "</w>", "é</w>"]
    tokenizer = Tokenizer(models.BPE(vocab=_vocab(words), merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.BPEDecoder()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def no_decoder() -> Tokenizer:
    """Tokens are joined by spaces."""
    tokenizer = Tokenizer(models.WordLevel(_vocab(["a", "b", "word", ".", "é"]), unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


KINDS = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "metaspace": metaspace,
    "word_piece": word_piece,
    "word_end": word_end,
    "no_decoder": no_decoder,
}


def sentencepiece_bpe() -> Tokenizer:
    """Like Gemma's: trained merges, bytes for what they lack, added tokens of white space."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.train_from_iterator(TEXTS[:1] * 4, trainers.BpeTrainer(vocab_size=60, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    vocab = _vocab([*_BYTES, *model["vocab"]])
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<bos>", "<start_of_turn>"])
    tokenizer.add_tokens([AddedToken("\n\n", normalized=False), AddedToken("▁▁▁", normalized=False), "unused99"])
    return tokenizer


def sentencepiece_unigram() -> Tokenizer:
    """Like XLM-R's and T5's: a unigram model, a space put before each text, unknown characters as bytes."""
    trainer = trainers.UnigramTrainer(vocab_size=60, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    trained = Tokenizer(models.Unigram())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(TEXTS[:1] * 4, trainer)
    pieces = [tuple(piece) for piece in json.loads(trained.to_str())["model"]["vocab"]]
    pieces += [(byte, -20.0) for byte in _BYTES]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("<mask>", lstrip=True, normalized=False), "<extra_id_0>"])
    return tokenizer


SENTENCEPIECE_KINDS = {"bpe": sentencepiece_bpe, "unigram": sentencepiece_unigram}


def vocabulary_of(tokenizer: Tokenizer, *, num_padding: int = 3, max_total_len: int = 0) -> Vocabulary:
    """As loaded from a folder. num_padding: ids of the model that its tokenizer does not know."""
    size = max(tokenizer.get_vocab().values()) + 1 + num_padding
    identity = ModelIdentity(name="small", vocab_size=size, max_total_len=max_total_len, eos_ids=())
    return Vocabulary.of(tokenizer, identity, "f" * 64)


def write_folder(
    folder: Path, tokenizer: Tokenizer, *, chat_template: str | None = None, config: dict[str, object] | None = None
) -> Path:
    """A model folder without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    size = max(tokenizer.get_vocab().values()) + 1
    eos_id = tokenizer.token_to_id("</s>")
    whole = {"vocab_size": size, "max_position_embeddings": 4096, "eos_token_id": eos_id, **(config or {})}
    (folder / "config.json").write_text(json.dumps(whole))
    tokenizer_config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    if chat_template is not None:
        tokenizer_config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return folder


_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _vocab(words: list[str]) -> dict[str, int]:
    return {word: i for i, word in enumerate(["<unk>", *words])}
