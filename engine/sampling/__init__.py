"""From logits to tokens: noise, penalties, truncation, log-probabilities."""
