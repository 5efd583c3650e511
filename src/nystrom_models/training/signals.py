# SPDX-License-Identifier: Apache-2.0
"""Signals that make a run save, or save and end."""

import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

# The signal to save and continue; it does not exist on Windows.
_SAVE = getattr(signal, "SIGUSR1", None)


class Signals:
    """Within a `with` block, signals do not end the process but set attributes.

    SIGTERM and SIGINT (Ctrl-C) set `stop`: the run saves after the current step, and ends. A second SIGINT ends it at
    once. SIGUSR1 sets `save`: the run saves, and continues.

    Only the main thread can handle signals. In other threads, and with `enabled=False`, nothing changes.
    """

    _ended_by: int | None = None  # for all instances: the signal that ended a run of this process

    def __init__(self, enabled: bool = True):
        self.enabled = enabled and threading.current_thread() is threading.main_thread()
        self.stop = self.save = False
        self._number = signal.SIGTERM  # another process of the run may have got the signal
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        if self.enabled:
            for number in (signal.SIGTERM, signal.SIGINT, _SAVE):
                if number is not None:
                    self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def end_run(self) -> None:
        """Notes for [`end_as_signalled`] that the run ends before its last step."""
        Signals._ended_by = self._number

    def take_save(self) -> bool:
        """Whether SIGUSR1 has arrived since the last call."""
        asked = self.save
        if asked:
            self.save = False
        return asked

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == _SAVE:
            self.save = True
        elif number == signal.SIGINT and self.stop:
            raise KeyboardInterrupt
        else:
            self.stop, self._number = True, signal.Signals(number)


def end_as_signalled() -> None:
    """If a signal ended a run, ends the process with 128 plus its number (143 for SIGTERM, 130 for Ctrl-C), the status
    that shells give to programs that signals end: further commands do not go on with an unfinished model."""
    if Signals._ended_by is not None:
        sys.exit(128 + Signals._ended_by)
