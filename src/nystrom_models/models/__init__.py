# SPDX-License-Identifier: Apache-2.0
"""The model families: exactly the files that a checkpoint needs to run, and that travel with it."""
