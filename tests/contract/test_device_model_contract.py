"""Contracts of DeviceModel, Attention and Mlp, kept by all kinds of parts with plain torch for kernels; tests/gpu has
those with the GPU's kernels, tests/kernels/test_linear.py the contract of Linear."""

from pathlib import Path

import pytest
import torch
from support.model_cases import CASES, FALLBACK_CASES, model_case, part_case
from support.model_contract import AttentionContract, DeviceModelContract, MlpContract, ModelCase, PartCase

from radixmesh.daemons.worker.cuda.fp8.ops import TorchFp8Ops
from radixmesh.daemons.worker.cuda.model.device_model import Kernels
from radixmesh.daemons.worker.cuda.ops import TorchOps


def _case(name: str, quantization: str, folder: Path) -> ModelCase:
    kernels = Kernels(TorchOps(), TorchFp8Ops(TorchOps()))
    return model_case(name, quantization, folder, torch.device("cpu"), kernels)


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case_of(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ModelCase]:
    name, quantization = request.param
    return name, _case(name, quantization, tmp_path_factory.mktemp(name))


class TestDeviceModel(DeviceModelContract):
    @pytest.fixture
    def case(self, case_of: tuple[str, ModelCase]) -> ModelCase:
        return case_of[1]


class TestFallbackModel(DeviceModelContract):
    @pytest.fixture(params=FALLBACK_CASES, ids="-".join)
    def case(self, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelCase:
        return _case(*request.param, tmp_path_factory.mktemp(request.param[0]))


class TestAttention(AttentionContract):
    @pytest.fixture
    def case(self, case_of: tuple[str, ModelCase]) -> PartCase:
        return part_case("attention", case_of[1], case_of[0])


class TestMlp(MlpContract):
    @pytest.fixture
    def case(self, case_of: tuple[str, ModelCase]) -> PartCase:
        return part_case("mlp", case_of[1], case_of[0])
