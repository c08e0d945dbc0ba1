"""Takes the buckets of a transport that must be read to its end, also after an error. Otherwise the sender would wait
for the acknowledgement of its next bucket until its time limit."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from qarl.rollout.publish.manifest import NamedTensor
from qarl.rollout.remote.receive import StreamReceiver


class Inbox:
    """Feeds `receiver` until the first error, `failure`. Later buckets are dropped."""

    def __init__(self) -> None:
        self.receiver: StreamReceiver | None = None
        self.failure: BaseException | None = None

    @contextmanager
    def keeping_failure(self) -> Iterator[None]:
        """Return a context that ends with its first error, which becomes `failure` and is not raised."""
        try:
            yield
        except BaseException as error:
            _traceback_as_text(error)
            self.failure = error

    def take(self, bucket: Iterable[NamedTensor], is_last: bool) -> None:
        """Take a bucket, whose memory may be used again afterwards."""
        if self.failure is not None or self.receiver is None:
            return
        with self.keeping_failure():
            self.receiver.feed(bucket)

    def close(self) -> None:
        """Raise `failure`, or RuntimeError if the engine has no complete publish after the last bucket."""
        if self.failure is not None:
            raise self.failure
        if self.receiver is not None and self.receiver.stale:
            raise RuntimeError(self.receiver.stale_because)


def _traceback_as_text(error: BaseException) -> None:
    """Replace the traceback of `error` with a note. Variables in its frames would keep the bucket alive, so the
    transport could not close its shared memory."""
    error.add_note("".join(traceback.format_exception(error)))
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
