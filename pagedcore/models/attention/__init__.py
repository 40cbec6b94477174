"""A model's attention becomes paged attention."""
