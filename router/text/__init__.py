"""Text in and out: tokenizer, chat template, control tokens, detokenizer, stop strings."""
