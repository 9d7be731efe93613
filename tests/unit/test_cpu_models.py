"""Model families are found by their folders, and nothing heavy is imported before it is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.worker.models.model import ModelFamily
from radixmesh.daemons.worker.models.registry import model_families


def test_a_folder_is_a_family() -> None:
    families = model_families()
    assert "LlamaForCausalLM" in families.names
    assert all(isinstance(families.create(name), ModelFamily) for name in families.names)


def test_an_unknown_architecture_is_refused_with_the_known_ones() -> None:
    with pytest.raises(MeshError, match="LlamaForCausalLM") as caught:
        model_families().create("MambaForCausalLM")
    assert caught.value.reason_name == "UNSUPPORTED"
    assert caught.value.metadata["name"] == "MambaForCausalLM"


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import radixmesh.daemons.worker.cpu", "torch"),
        ("import radixmesh.daemons.worker.sampling.sampler", "torch"),
        (
            "from radixmesh.daemons.worker.models.registry import model_families; model_families()",
            "radixmesh.daemons.worker.models.decoder.model",
        ),
        (
            "from radixmesh.daemons.worker.cpu.attention.registry import attention_backends; attention_backends()",
            "radixmesh.daemons.worker.cpu.attention.paged_torch",
        ),
        (
            "from radixmesh.daemons.worker.cpu import load_cpu_runner\n"
            "try: load_cpu_runner(__import__('pathlib').Path('nowhere'))\n"
            "except Exception: pass",
            "transformers",
        ),
    ],
)
def test_imports_stay_lazy(statement: str, absent: str) -> None:
    check = f"{statement}\nimport sys; sys.exit(3 if {absent!r} in sys.modules else 0)"
    result = subprocess.run(
        [sys.executable, "-c", check],
        env={"PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr or f"{absent} was imported"
