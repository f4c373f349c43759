"""The router, tested over real sockets with fake workers, and its pure parts with hypothesis."""
