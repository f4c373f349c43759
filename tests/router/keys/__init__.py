"""Keys without a router: their file, their buckets, and the processes that share them."""
