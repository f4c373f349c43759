"""How a Hugging Face `config.json` is read: every field as `transformers` reads it, or refused.

A field that decides the arithmetic is read as `transformers.DeepseekV3Config` reads it: its
spellings, its default where the field is absent, its meaning of null. What it may say and we do not
serve is refused by name. A field that is neither read nor known to leave the model alone is told.
`known` holds the names, `fields` the typed access, `rope` and `quantization` the nested objects.
"""
