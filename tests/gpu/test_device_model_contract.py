"""Contracts of DeviceModel, Attention and Mlp, kept by all kinds of parts with the GPU's kernels
in float32."""

from pathlib import Path

import pytest
import torch
from support.model_cases import CASES, model_case, part_case
from support.model_contract import AttentionContract, DeviceModelContract, MlpContract, ModelCase, PartCase

from radixmesh.daemons.worker.cuda.fp8.gemm import TritonFp8Gemm
from radixmesh.daemons.worker.cuda.fp8.ops import TritonFp8Ops
from radixmesh.daemons.worker.cuda.model.device_model import Kernels
from radixmesh.daemons.worker.cuda.ops import TritonOps

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case_of(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ModelCase]:
    name, quantization = request.param
    kernels = Kernels(ops := TritonOps(), TritonFp8Ops(ops, TritonFp8Gemm()))
    folder: Path = tmp_path_factory.mktemp(name)
    return name, model_case(name, quantization, folder, torch.device("cuda"), kernels)


class TestDeviceModel(DeviceModelContract):
    @pytest.fixture
    def case(self, case_of: tuple[str, ModelCase]) -> ModelCase:
        return case_of[1]


class TestAttention(AttentionContract):
    @pytest.fixture
    def case(self, case_of: tuple[str, ModelCase]) -> PartCase:
        return part_case("attention", case_of[1], case_of[0])


class TestMlp(MlpContract):
    @pytest.fixture
    def case(self, case_of: tuple[str, ModelCase]) -> PartCase:
        return part_case("mlp", case_of[1], case_of[0])
