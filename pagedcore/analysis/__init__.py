"""What watches, predicts, explains, records or replays an engine; nothing here is imported by one that is not asked."""
