"""Places at which a text can be cut so that its parts, encoded one by one, give the ids of the whole.

A cut is proven from what tokenizer.json says. It lies behind a letter before an ASCII digit, space or punctuation mark
(or a common CJK one), or behind any visible ASCII character before a space. There
- every regular expression of KNOWN_SPLITS ends one match and begins the next: none has an alternative that goes on
  from a letter to such a character, or from a visible character to a space; none looks behind, and the only look
  ahead, `\\s+(?!\\S)`, is asked of white space, which the part before the cut does not end with;
- NFC composes nothing, since what follows is never the second half of a composition;
- no added token lies across: pairs of characters inside one, and neighbours that its flags look at, are left out.
A pre-tokenizer, normalizer or post-processor that is not known gives no cutter: such texts are encoded whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

_LETTER = "A-Za-zÀ-ÖØ-öø-ÿа-яА-Я一-龥ぁ-ゖァ-ヺ가-힣"
# Without the apostrophe: "'s" belongs to the word before it in some splits.
_AFTER_LETTER = r" \t\r\n0-9!\"#$%&()*+,\-./:;<=>?@\[\\\]^_`{|}~、。，！？；："
_CUT = re.compile(f"[{_LETTER}](?=[{_AFTER_LETTER}])|[!-~](?= )")

_WORDS_GPT4 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
_CONTRACTED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KNOWN_SPLITS = (
    # GPT-2, also what ByteLevel splits by itself.
    (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",),
    # Llama 3, Qwen 2 and 3.
    (_WORDS_GPT4 + r"\p{N}{1,3}" + _MARKS + _SPACES,),
    (_WORDS_GPT4 + r"\p{N}" + _MARKS + _SPACES,),
    # o200k (gpt-oss).
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + _CONTRACTED + "|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + _CONTRACTED + "|"
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES,
    ),
    # DeepSeek V3: digits, then CJK, then the rest.
    (
        r"\p{N}{1,3}",
        "[一-龥\u3040-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
        r" ?[\p{P}\p{S}]+[\r\n]*" + _SPACES,
    ),
)
# A part of so many characters without a cut is refused, whatever follows.
MAX_UNCUT_CHARS = 1 << 20
_PIECE_CHARS = 16 << 10
# They put ids around a text and do not look inside.
_OUTER_PROCESSORS = ("TemplateProcessing", "ByteLevel", "RobertaProcessing", "BertProcessing")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextCutter:
    """Cuts texts of one tokenizer. inner_pairs: neighbours inside an added token; last, first: see _added_tokens."""

    inner_pairs: frozenset[str]
    last: frozenset[str]
    first: frozenset[str]

    def parts(self, text: str, target: int) -> Iterator[str]:
        """The text in parts of `target` characters or more, each as short as the text allows."""
        begin = 0
        while len(text) - begin > target:
            end = self._cut_from(text, begin + target)
            yield text[begin:end]
            begin = end
        if begin < len(text):
            yield text[begin:]

    def _cut_from(self, text: str, start: int) -> int:
        # The search holds the interpreter lock: in pieces, so that the event loop gets its turns, and no further than a
        # part may reach. Two characters behind a piece's end, what was found there is found again.
        for begin in range(start - 1, min(len(text), start + MAX_UNCUT_CHARS), _PIECE_CHARS):
            for found in _CUT.finditer(text, begin, min(len(text), begin + _PIECE_CHARS + 2)):
                end = found.end()
                pair = text[end - 1 : end + 1]
                if pair[0] not in self.last and pair[1] not in self.first and pair not in self.inner_pairs:
                    return end
        return len(text)


def cutter_of(tokenizer: Tokenizer) -> TextCutter | None:
    """The cutter of a tokenizer; None where no cut is known to be right."""
    spec = json.loads(tokenizer.to_str())
    if (
        not _is_known_split(steps_of(spec.get("pre_tokenizer"), "pretokenizers"))
        or any(step.get("type") != "NFC" for step in steps_of(spec.get("normalizer"), "normalizers"))
        or any(step.get("type") not in _OUTER_PROCESSORS for step in steps_of(spec.get("post_processor"), "processors"))
        or spec["model"].get("dropout")
    ):
        return None
    pairs: set[str] = set()
    last: set[str] = set()
    first: set[str] = set()
    for token in spec.get("added_tokens", ()):
        content = token["content"]
        pairs.update(content[i : i + 2] for i in range(len(content) - 1))
        # rstrip swallows the white space behind it; single_word looks at the character on either side.
        if token["rstrip"] or token["single_word"]:
            last.add(content[-1])
        if token["single_word"]:
            first.add(content[0])
    return TextCutter(inner_pairs=frozenset(pairs), last=frozenset(last), first=frozenset(first))


def outer_ids(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The ids that the post-processor puts before and behind every text."""
    encoding = tokenizer.encode("a", add_special_tokens=True)
    mask = encoding.special_tokens_mask
    begin = next((i for i, is_outer in enumerate(mask) if not is_outer), len(mask))
    end = len(mask) - next((i for i, is_outer in enumerate(reversed(mask)) if not is_outer), 0)
    return encoding.ids[:begin], encoding.ids[end:]


def steps_of(part: Mapping[str, object] | None, name: str) -> Sequence[Mapping[str, object]]:
    """The steps of a normalizer, pre-tokenizer or processor of tokenizer.json; name: where a Sequence keeps them."""
    if part is None:
        return ()
    if part.get("type") == "Sequence":
        steps = part[name]
        assert isinstance(steps, list)
        return steps
    return (part,)


def _is_known_split(steps: Sequence[Mapping[str, object]]) -> bool:
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return False
    *splits, bytes_step = steps
    if not splits:
        return bool(bytes_step.get("use_regex", True))
    if bytes_step.get("use_regex", True):
        return False
    patterns = []
    for step in splits:
        pattern = step.get("pattern")
        is_plain = step.get("type") == "Split" and step.get("behavior") == "Isolated" and not step.get("invert")
        if not is_plain or not isinstance(pattern, dict):
            return False
        patterns.append(pattern.get("Regex"))
    return tuple(patterns) in KNOWN_SPLITS
