"""The demo model that ships inside the package, and the questions it can be checked with.

Owns the weight files next to this module and the questions with known answers; it never imports torch
or transformers. The model was trained on conversations of up to 256 tokens and answers worse and worse
beyond them, although it accepts 2048. Read `questions.py` next;
`examples/train_demo_model.py` trains the weights again.
"""

from pathlib import Path

DEMO_MODEL_DIR: Path = Path(__file__).resolve().parent
"""Directory that `from_pretrained` of transformers, or the engine, loads the demo model from."""
