"""Which rank is slower than the others, by what, and whether that is more than noise."""
