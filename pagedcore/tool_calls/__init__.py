"""Tool calls and reasoning in a model's output: parsers for what it writes, grammars for what it may write."""
