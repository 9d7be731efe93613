"""BERT and its kin: encoders that see a whole prompt at once, for embed tasks on a CPU.

Importing this package imports no torch.
"""

from __future__ import annotations

ENCODER_ARCHITECTURES = (
    "BertForMaskedLM",
    "BertModel",
    "RobertaForMaskedLM",
    "RobertaModel",
    "XLMRobertaForMaskedLM",
    "XLMRobertaModel",
)
