"""Integers of 4 or 8 bits that a file packs into int32, the first one in the lowest bits.

Owns the arithmetic of bits alone; which dimension is packed, and in which order, is a format's matter.
"""

from __future__ import annotations

import torch


def num_words(num_values: int, bits: int) -> int:
    """Return how many int32 hold so many integers."""
    return -(-num_values * bits // 32)


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return int8 [..., words * 32 / bits] of int32 [..., words]: integers from 0 up, less half of their range."""
    octets = words.contiguous().view(torch.uint8)
    if bits == 8:
        return (octets ^ 0x80).view(torch.int8)
    return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(-2).view(torch.int8) - 8


def pack(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Return int32 [..., words] of int8 [..., values], the inverse of ``unpack``; missing integers are zero bits."""
    octets = torch.nn.functional.pad(values, (0, -values.shape[-1] % (32 // bits)), value=-(2 ** (bits - 1)))
    if bits == 8:
        return (octets.view(torch.uint8) ^ 0x80).contiguous().view(torch.int32)
    nibbles = (octets + 8).view(torch.uint8)
    return (nibbles[..., ::2] | nibbles[..., 1::2] << 4).contiguous().view(torch.int32)
