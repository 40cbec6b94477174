"""Which decoder is the fastest on a device, beside an attention backend. Computes nothing."""

from __future__ import annotations

from functools import partial

from pagedcore.models.decoders.fused import best_decoder
from pagedcore.models.decoders.plain import DecoderFactory, PlainDecoder
from pagedcore.protocols import AttentionFactory, LinearFactory
from pagedcore_kernels.interface import LaunchesKernels


def best_factory(device_kind: str, attention_factory: AttentionFactory, linears: LinearFactory) -> DecoderFactory:
    """Return what makes the fastest decoder of a model; ``linears`` makes its products on the CPU."""
    if device_kind == "cpu":
        return partial(best_decoder, linears=linears)
    if not isinstance(attention_factory, LaunchesKernels):
        return PlainDecoder
    from pagedcore.models.decoders.cuda_decoder import best_cuda_decoder

    return best_cuda_decoder
