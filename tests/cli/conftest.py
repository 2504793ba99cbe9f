"""No test of the command keeps programs in the user's folder."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def programs_elsewhere(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STREE_JAX_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
