"""The folder of the model that a user named: a folder of this machine, or a repository of the Hugging Face hub."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

# Weights as safetensors and what daemons read beside them; other formats of the same weights are left on the hub.
_WANTED_FILES = ("*.json", "*.safetensors", "*.jinja")
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")


class ModelSourceError(Exception):
    """No model folder could be had; the text says what to do."""


def find_model_folder(named: str, *, revision: str | None, say: Callable[[str], None]) -> Path:
    """Returns the absolute folder of a model, downloaded into the hub's cache where `named` is no folder.

    named: a path, or `organisation/name` on the hub. revision: branch, tag or commit there. say: gets one line before
    a download begins. Raises ModelSourceError.
    """
    path = Path(named).expanduser()
    if path.is_dir():
        return path.absolute()
    if path.exists():
        raise ModelSourceError(f"{named} is a file: name the folder that holds config.json and the weights")
    if not _HUB_NAME.fullmatch(named):
        raise ModelSourceError(f"{named} is no folder here, and no name on the hub either: those are organisation/name")
    return _download(named, revision, say)


def served_name(named: str) -> str:
    """The name by which clients ask for the model: the hub's, or the folder's, of a link the link's own."""
    is_hub_name = _HUB_NAME.fullmatch(named) and not Path(named).expanduser().is_dir()
    return named if is_hub_name else os.path.basename(os.path.abspath(os.path.expanduser(named)))


def _download(name: str, revision: str | None, say: Callable[[str], None]) -> Path:
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError as error:
        raise ModelSourceError(
            f"{name} is no folder here, and the hub needs huggingface_hub: pip install huggingface_hub"
        ) from error
    say(f"{name} is no folder here: taking it from the hub's cache, and from the hub what the cache lacks.")
    try:
        folder = Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=list(_WANTED_FILES)))
    except errors.GatedRepoError as error:
        raise ModelSourceError(
            f"{name} asks for its terms to be accepted: do so on its page of the hub, then set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelSourceError(
            f"the hub has no {name}, or shows it to some accounts only: check the name, or set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelSourceError(f"{name} has no revision {revision!r} on the hub") from error
    except (errors.HFValidationError, ValueError) as error:
        raise ModelSourceError(f"{name} is no name on the hub: {error}") from error
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, OSError) as error:
        raise ModelSourceError(
            f"{name} is neither a folder here nor in the hub's cache, and the hub cannot be reached "
            f"({_first_line(error)}): download it elsewhere and name the folder"
        ) from error
    if not (folder / "config.json").is_file():
        raise ModelSourceError(f"{name} holds no config.json: it is no model in transformers' format")
    return folder


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
