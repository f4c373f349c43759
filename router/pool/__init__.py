"""Who is there and how loaded: the registry of workers, and each HTTP process's view of it."""
