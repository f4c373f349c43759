"""Plans of experts on synthetic skew: what they reach, and how long they take to make."""
