"""Other APIs than OpenAI's chat and completions, translated into these and back."""
