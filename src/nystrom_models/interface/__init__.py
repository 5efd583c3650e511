# SPDX-License-Identifier: Apache-2.0
"""`attn_implementation="nystrom"`: Nyström attention for the encoders of Transformers, as they are.

Transformers asks for attention by name: a function (`attention.py`) and what makes its mask (`masks.py`). Which
layers of a model have it, and with how many landmarks, is in the model's configuration (`settings.py`). Importing
`nystrom_models` registers the name.
"""

from .settings import use_nystrom

__all__ = ["use_nystrom"]
