"""Which sequences run next: iteration-level scheduling over one KV cache. Knows no device, no clock and no text."""
