"""Every test compiles for itself."""

import pytest
import torch
from torch._dynamo.utils import counters


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
