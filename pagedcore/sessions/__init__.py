"""Sessions: conversations that wait, fork and move between processes."""
