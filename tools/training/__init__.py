"""How the bundled model was made: corpus, tokenizer, training, FP8 export, evaluation.

Nothing here runs in a server. The product is the folder `deploy/models/tandem-python`, which the
servers read like any other checkpoint. Order of use: `dataset`, `train`, `evaluate`.
"""
