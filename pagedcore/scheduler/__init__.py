"""Who runs next: iteration-level scheduling over one KV cache. Knows no device, no clock of its own and no text."""
