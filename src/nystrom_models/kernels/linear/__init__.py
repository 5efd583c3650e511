# SPDX-License-Identifier: Apache-2.0
"""Causal linear attention: `dispatch.py` decides, `attention.py` is the operator, `causal.py` its kernels."""
