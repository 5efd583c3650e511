# SPDX-License-Identifier: Apache-2.0
"""What `--help` of the scripts prints."""

from dataclasses import dataclass, field

import pytest

from nystrom_models.training.arguments import parse_arguments


def test_help_keeps_the_command_apart_and_shows_defaults_that_exist(capsys):
    @dataclass
    class Flags:
        """Flags."""

        name: str = field(metadata={"help": "A name."})
        size: int | None = field(default=None, metadata={"help": "The model's by default."})
        steps: int = field(default=3, metadata={"help": "Steps."})
        shuffle: bool = field(default=True, metadata={"help": "Shuffle the rows."})

    with pytest.raises(SystemExit):
        parse_arguments((Flags,), ["--help"], "Do it.\n\n    python do.py --name NAME\n\ndoes it.")
    printed = capsys.readouterr().out
    assert "\n    python do.py --name NAME\n\ndoes it.\n" in printed
    assert "Steps. (default: 3)" in printed and "Switch --shuffle off.\n" in printed
    assert "A name.\n" in printed and "The model's by default.\n" in printed
