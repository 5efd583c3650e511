# SPDX-License-Identifier: Apache-2.0
"""Causal linear attention: `dispatch.py` decides whether kernels apply, `attention.py` is the operator, `causal.py`
holds its kernels.
"""
