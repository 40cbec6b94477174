"""Training-only parts of the demo model: tokenizer, conversations and measuring; see `train_demo_model.py`."""
