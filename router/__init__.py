"""The router: OpenAI-compatible HTTP in front of paired prefill and decode workers.

The only place that knows text. A request is validated, templated, tokenized and admitted here,
paired with (prefill, decode, dp_rank), followed through both workers, detokenized and streamed
back; where a worker fails it moves to others. The router holds no model and no KV;
``python -m router --config FILE`` runs it.

Its rooms: ``http`` (the API), ``text``, ``pool`` (who is there), ``routing`` (which pair),
``requests`` (what happens to a request). Imports go http > requests > routing > pool; text knows no
worker.
"""
