"""ThreadPrefetcher: the pipe that loads items ahead on one background thread."""

from __future__ import annotations

from typing import Any

from torch.utils.data import IterDataPipe, functional_datapipe

from sidestream.stage import Stage, check_count
from sidestream.transfer import Fence, nbytes
from sidestream.worker import BackgroundIterator, Worker

__all__ = ["ThreadPrefetcher"]


@functional_datapipe("thread_prefetch")
class ThreadPrefetcher(Stage):
    """Loads items ahead on one background thread. Functional form: `.thread_prefetch(...)`.

    Items, order and errors are those of the source: an error comes out of the consumer's `next()` after the items
    before it, the same object. Nothing runs before the first `next()`. The thread ends when the iterator does, is
    dropped or closed, when a new one is made, and before the interpreter exits; `with contextlib.closing(iter(pipe))
    as it:` ends it at a known place.

    The thread has the consumer's grad mode, inference mode, autocast, default device, CUDA device and context variables
    as they were at the first `next()`. Function modes and dispatch modes are not carried. Random numbers drawn upstream
    from a global generator interleave with the consumer's: give each pipe a generator of its own.

    A source that overwrites what it yielded (one buffer for all items) cannot stand before this stage, which looks
    ahead: put a `.map(copy.deepcopy)` between. Two stages must not share a source: put one stage before `.fork()`,
    not one behind each branch.

    If items hold CUDA tensors, the stream that is current at `next()` waits, on the device, for the work that the
    thread had queued on its current stream, and their memory is not used again before that stream is done with it.

    Args:
        source_datapipe: Where the items come from.
        buffer_size: How many items may wait [items]; one more is in the thread's hand.
        max_bytes: How much may wait, counting the bytes of tensors [bytes]; one item always may. None: no limit.
        close_timeout: How long closing, a new iterator and `pause()` wait for a thread that is inside the source
            [seconds]. One that is stuck for longer is left behind with a RuntimeWarning that shows where it stands.

    Raises:
        TypeError: `buffer_size` or `max_bytes` is no int, `close_timeout` no number.
        ValueError: One of them is out of range.
    """

    def __init__(
        self,
        source_datapipe: IterDataPipe[Any],
        buffer_size: int = 2,
        *,
        max_bytes: int | None = None,
        close_timeout: float = 2.0,
    ) -> None:
        super().__init__(source_datapipe, buffer_size, close_timeout)
        self.max_bytes = None if max_bytes is None else check_count("max_bytes", max_bytes)

    def make_courier(self) -> Fence:
        """Make the courier that orders CUDA tensors made upstream; it leaves all other items alone."""
        return Fence(self.buffer_size)

    def make_iterator(self, worker: Worker) -> BackgroundIterator:
        """Make the iterator of a new epoch. Nothing runs yet."""
        return BackgroundIterator(
            self.source_datapipe,
            self.make_courier,
            worker,
            buffer_size=self.buffer_size,
            max_bytes=self.max_bytes,
            weigh=nbytes,
        )
