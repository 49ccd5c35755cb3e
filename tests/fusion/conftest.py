"""Every test compiles for itself."""

import pytest


@pytest.fixture(autouse=True)
def _fresh_compiler(fresh_compiler):
    pass
