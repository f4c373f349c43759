"""The Helm chart: what it renders, what it refuses, and that it agrees with the tree."""
