"""How AITER fails.

The faults are BaseException: no `except Exception` may swallow them, as none can undo a process
that ended or a cache that is wrong.
"""


class Fault(BaseException):
    """What the real AITER would have done to this call."""


class Aborted(Fault):
    """A failed check of the C++ side: std::abort() ends the process."""


class SilentlyWrong(Fault):
    """Nothing is checked; memory is misread, or results are wrong, or writes are lost."""


def reject(at, why):
    """A failed check: before v0.1.14 a RuntimeError, from then on the end of the process."""
    if at.has("aborts"):
        raise Aborted(why)
    raise RuntimeError(why)


def check(at, ok, why):
    """A check that AITER makes."""
    if not ok:
        reject(at, why)


def assume(ok, why):
    """A check that AITER does not make."""
    if not ok:
        raise SilentlyWrong(why)
