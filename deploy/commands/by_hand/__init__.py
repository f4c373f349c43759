"""Commands that start one process, for whoever starts them by hand or in pods."""
