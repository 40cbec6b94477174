"""From scheduled rows to sampled tokens: ragged batches, models, sampling."""
