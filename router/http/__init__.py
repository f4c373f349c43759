"""The OpenAI API over HTTP: connections, endpoints, bodies and their errors, answers.

All that a stranger can send is bounded here, before a worker or a tokenizer hears of it.
"""
