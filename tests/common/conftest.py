# SPDX-License-Identifier: Apache-2.0
import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Eager attention and `sdpa` are compared with the backends that users have; once more, without them, is slow."""
    for item in items:
        name = item.name
        if name.startswith("test_eager_matches_sdpa_inference_") and name.endswith(("_left", "_right", "_mask")):
            item.add_marker(pytest.mark.slow)
