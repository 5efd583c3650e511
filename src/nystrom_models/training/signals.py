# SPDX-License-Identifier: Apache-2.0
"""Signals that make a run save, or save and end."""

import signal
import sys
import threading
from collections.abc import Callable, Mapping
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

    # For all instances: the signal that ended a run of this process; one that came too late to end its last run.
    _ended_by: int | None = None
    _late: int | None = None

    def __init__(self, enabled: bool = True):
        self.enabled = enabled and threading.current_thread() is threading.main_thread()
        self.stop = self.save = False
        self._number = signal.SIGTERM  # another process of the run may have got the signal
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        Signals._late = None
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
        """Notes for [`run_script`] that the run ends before its last step."""
        Signals._ended_by = self._number

    def end_late(self) -> None:
        """Notes for [`no_further_run`] that a signal came when the run was about to finish."""
        Signals._late = self._number

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


def no_further_run(results: Mapping[str, Any]) -> bool:
    """Whether a signal ended the run with these results, which then has no held-out figures, or came when the run was
    about to finish. No other run should begin, and the process ends as if the signal had ended the run."""
    late, Signals._late = Signals._late, None
    if late is not None:
        Signals._ended_by = late
    return late is not None or not any(split.startswith("validation") for split in results)


def run_script(main: Callable[[], Any]) -> None:
    """Runs the main function of a script. SIGUSR1 is ignored outside of training.

    If a signal ended a run, the process ends with the status that shells give to programs that signals end, 143 for
    SIGTERM and 130 for Ctrl-C: further commands do not go on with an unfinished model.
    """
    if _SAVE is not None and signal.getsignal(_SAVE) is signal.SIG_DFL:
        signal.signal(_SAVE, signal.SIG_IGN)
    main()
    end_as_the_signal()


def end_as_the_signal() -> None:
    """Ends the process as the signal that ended a run would have ended it; returns if none did."""
    if Signals._ended_by == signal.SIGINT:
        # A shell leaves a loop only if Ctrl-C itself has ended the program, and Python does so after this exception.
        sys.excepthook = lambda *_: None
        raise KeyboardInterrupt
    if Signals._ended_by is not None:
        sys.exit(128 + Signals._ended_by)
