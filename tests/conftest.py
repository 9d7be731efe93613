"""What holds for all tests: GPU tests are skipped with a reason, and property tests have no deadline of their own."""

import pytest
from hypothesis import settings

# Two shared cores: a slow example says nothing about the code. pytest's own timeout catches a hang.
settings.register_profile("mesh", deadline=None)
settings.load_profile("mesh")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch  # Slow to import: only where a GPU test was collected.

    if torch.cuda.is_available():
        return
    for item in gpu_items:
        item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))
