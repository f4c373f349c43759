"""A request on its way through the workers: admission, attempts, token streams."""
