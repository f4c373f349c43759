"""OpenAI's APIs: what a request asks for, and what its answer says."""
