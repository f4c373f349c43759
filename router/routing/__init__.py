"""Which prefill worker and which decode rank serve a request."""
