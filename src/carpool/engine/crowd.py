"""The garbage collector, while a crowd waits.

Each waiting call is a dozen objects, and a full collection looks at every one of them to find that nothing is garbage;
it does so again whenever there are a quarter more. So those who wait are set aside by steps, as `gc.freeze` does it.
Nothing that is made later is exempt, and when nearly all of them have gone, what was set aside is looked at again.
"""

from __future__ import annotations

import gc

STEP = 4096  # below it a full collection takes a few milliseconds
LEFT = 16  # one of so many


class Crowd:
    def __init__(self) -> None:
        self._known = 0  # as many waited at the last look
        self._aside = False

    def grew(self, waiting: int) -> None:
        if waiting - self._known < STEP:
            return
        # A process that froze objects itself, or collects when it wants to, has an arrangement of its own.
        if self._aside or (gc.isenabled() and not gc.get_freeze_count()):
            gc.collect(1)  # young garbage is not set aside; the old may be, until the crowd has gone
            gc.freeze()
            self._aside = True
        self._known = waiting

    def shrank(self, waiting: int) -> None:
        if waiting * LEFT >= self._known:
            return
        if self._aside:
            gc.unfreeze()
            self._aside = False
        self._known = 0
