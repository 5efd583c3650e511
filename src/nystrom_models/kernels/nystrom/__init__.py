# SPDX-License-Identifier: Apache-2.0
"""Nyström attention: `dispatch.py` decides, `attention.py` puts the stages together, a stage a file."""
