"""Ctrl-C at a point that a test chooses: a real SIGINT before the n-th bytecode of kvtrie's own.

Invariant: equal numbers strike the same point; threads other than the main one are never struck.
Cost: a call per bytecode of `kvtrie.transfer` and of the standard library's locks.
"""

import inspect
import signal
import sys
import threading
from pathlib import Path

import kvtrie.transfer

WHERE = (str(Path(kvtrie.transfer.__file__).parent), threading.__file__)


class CtrlC:
    """Strikes once, in the calls made within its block.

    Args:
        at: before which bytecode; beyond the last one, nothing happens.

    Attributes:
        passed: bytecodes that have been counted.
        struck: where it struck; None if it has not.
    """

    def __init__(self, at):
        self.at = at
        self.passed = 0
        self.struck = None

    def __enter__(self):
        self.before, self.own = sys.gettrace(), inspect.currentframe().f_back
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_):
        sys.settrace(self.before)

    def _enter(self, frame, event, arg):  # noqa: ARG002 - what a trace function is given
        if not frame.f_code.co_filename.startswith(WHERE):
            return None
        frame.f_trace_opcodes = True
        return self._step

    def _step(self, frame, event, arg):  # noqa: ARG002 - as above
        if event == "opcode" and self.struck is None:
            self.passed += 1
            if self.passed == self.at:
                self.struck = f"{frame.f_code.co_qualname}:{frame.f_lineno}, {frame.f_lasti}"
                signal.raise_signal(signal.SIGINT)
        return self._step
