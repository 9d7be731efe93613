"""Kernels run on the GPU where there is one, and under Triton's interpreter elsewhere."""

import os

import pytest
import torch

# Read when a kernel is defined: it has to be set before any module with kernels is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Some kernels take the interpreter twenty times as long as it is.
import support.triton_interpreter  # noqa: F401


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _one_seed() -> None:
    torch.manual_seed(0)
