"""The OpenAI API over HTTP: endpoints, bodies and their errors, answers whole or streamed."""
