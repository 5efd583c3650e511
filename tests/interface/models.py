# SPDX-License-Identifier: Apache-2.0
"""Encoders of Transformers that the tests of this folder share."""

import torch

from benchmarks.architecture_table import quiet
from benchmarks.architectures import ARCHITECTURES

LENGTH = 40


def make(name, seed=0):
    """The small model of an architecture in the table, with random weights, in evaluation mode."""
    (architecture,) = (architecture for architecture in ARCHITECTURES if architecture.name == name)
    torch.manual_seed(seed)
    with quiet():
        return architecture.build()


def tokens(rows=2, length=LENGTH):
    return torch.randint(10, 100, (rows, length))
