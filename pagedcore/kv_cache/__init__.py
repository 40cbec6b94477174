"""The KV cache's bookkeeping: which block holds what, and for whom. Moves no bytes."""
