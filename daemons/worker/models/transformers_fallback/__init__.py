"""Causal language models that have no family here, run by the modules of transformers with our paged attention.

Importing this package imports neither torch nor transformers.
"""

from __future__ import annotations


def is_causal_model(architecture: str) -> bool:
    """True if an installed transformers has a causal language model of that name; it may still refuse to run so."""
    try:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    except ModuleNotFoundError:
        return False
    return architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
