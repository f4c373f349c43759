"""How `config.json` is read, field by field, against the installed transformers."""
