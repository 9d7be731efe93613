"""GPT-OSS's harmony format: messages with a channel each, of reasoning, calls and the answer.

<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json
<|message|>{...}<|call|>   or   <|start|>assistant<|channel|>final<|message|>...<|return|>
"""

from __future__ import annotations

import re

from radixmesh.daemons.router.chat.call_reader import CallReader
from radixmesh.daemons.router.chat.text_reader import Malformed, Reading

_BODY_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_TO = r"(?:\s+to=(?P<{}>[^\s<]+))?"
_HEAD = re.compile(
    rf"(?:<\|start\|>\s*\w+)?{_TO.format('early')}\s*<\|channel\|>\s*(?P<channel>[a-z]+){_TO.format('late')}"
    r"\s*(?:<\|constrain\|>)?\s*\w*\s*"
)


class HarmonyReader(CallReader):
    """Reads reasoning and calls, since the channels hold both. Messages to anything but a function are content."""

    triggers = ("<|start|>", "<|channel|>")
    has_reasoning = True

    def read_start(self) -> Reading[None]:
        # The prompt ends behind "assistant": a recipient may come before the channel.
        if (yield from self.peek()) == " ":
            yield from self.attempt("")

    def calls(self, marker: str) -> Reading[None]:
        """One message."""
        head = _HEAD.fullmatch(marker + (yield from self.through("<|message|>")))
        if head is None:
            raise Malformed
        recipient = head["early"] or head["late"]
        if recipient is not None:
            self.begin_call(recipient.removeprefix("functions."))
            sink = self.arguments
        else:
            self.drop_raw()
            sink = self.reasoning if head["channel"] == "analysis" else self.content
        ending = yield from self.pass_until(_BODY_ENDS, sink)
        if ending in ("<|end|>", "<|call|>", "<|return|>"):
            self.take(self._at + len(ending))
