"""The devices that calls are recorded on, one after the other."""

import pytest

from octavo.runtime import call_cache as calls


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A device, the only one that calls are recorded on."""
    monkeypatch.setattr(calls, "DEVICES", {request.param})
    return request.param
