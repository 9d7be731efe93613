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


def is_chosen(architecture: str, model_impl: str) -> bool:
    """True if transformers' modules are to compute a model. model_impl: as the worker's flag."""
    from radixmesh.daemons.worker.models.registry import model_families

    return model_impl == "transformers" or (model_impl == "auto" and architecture not in model_families().names)
