"""Two DataPipe stages that keep an accelerator fed.

    dp = source.map(decode).batch(64).collate().thread_prefetch().to_cuda_stream("cuda")
    for batch in DataLoader2(dp):  # on the GPU, ready for the current stream
        train(batch)

`ThreadPrefetcher` loads items ahead on a background thread. `CudaStreamMover` moves each sample to the device ahead
of its consumer, on a side stream, and lets the consumer's stream wait for it. Importing this package registers both
functional forms.
"""

from sidestream.loader import prefetch
from sidestream.mover import CudaStreamMover
from sidestream.prefetch import ThreadPrefetcher
from sidestream.samples import register_sample_type

__all__ = ["CudaStreamMover", "ThreadPrefetcher", "prefetch", "register_sample_type"]
