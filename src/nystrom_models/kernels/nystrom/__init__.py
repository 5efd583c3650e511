# SPDX-License-Identifier: Apache-2.0
"""Nyström attention: `dispatch.py` decides whether kernels apply, `attention.py` combines the stages, which have a
file each.
"""
