# SPDX-License-Identifier: Apache-2.0
"""`attn_implementation="nystrom"`: Nyström attention for the unchanged encoders of Transformers.

Transformers chooses attention by name: a function (`attention.py`) and a function that makes its mask (`masks.py`).
The model's configuration says which layers use it, and with how many landmarks (`settings.py`). Importing
`nystrom_models` registers the name.
"""

from .settings import use_nystrom

__all__ = ["use_nystrom"]
