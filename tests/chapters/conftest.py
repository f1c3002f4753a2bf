"""Token caches of the programs under test go to a folder of the session."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPT2_CHINESE_CACHE", str(tmp_path_factory.mktemp("tokens")))
        yield
