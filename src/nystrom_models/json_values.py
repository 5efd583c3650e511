# SPDX-License-Identifier: Apache-2.0
"""Values for JSON files, which have no NaN."""

import math
from collections.abc import Mapping
from typing import Any


def json_value(value: Any) -> Any:
    """`value` with null in place of NaN and infinities, which JSON does not have."""
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
