"""The request path: many clients, hostile ones, and the cost of a choice."""
