"""What an engine records of its decisions: a bounded ring in memory, and the file it is dumped to."""
