"""KV blocks: which are free, who holds which, and where a position lies. No bytes are touched here."""
