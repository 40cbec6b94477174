"""Text to tokens and back: tokenizer, chat template, detokenizers, stop strings, the stream of one answer."""
