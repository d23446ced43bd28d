"""Tests that need CUDA: ``make test-gpu`` runs them, elsewhere they are skipped."""

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.path.parts:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device: make test-gpu"))


@pytest.fixture(scope="session", autouse=True)
def started_autograd() -> None:
    """Torch warns if the first kernel of autograd's own thread is a product; here the first is another one."""
    if torch.cuda.is_available():
        torch.ones(1, device="cuda", requires_grad=True).exp().sum().backward()
