"""The demo model that ships inside the package, and the questions it can be checked with.

Owns the weight files next to this module and the questions with known answers; it never imports torch
or transformers. The model was trained on conversations of up to 384 tokens and is right less and less often
beyond them, although it accepts 2048. It also calls a calculator and other tools of a list, and fills small
JSON objects; `examples/demo_model/README.md` says how. Read `questions.py` next; `examples/demo_model/` has the
generators of the questions, and `examples/train_demo_model.py` trains the weights again.
"""

from pathlib import Path

DEMO_MODEL_DIR: Path = Path(__file__).resolve().parent
"""Directory that `from_pretrained` of transformers, or the engine, loads the demo model from."""
