"""Grafana dashboards: `panels.toml` is their table, `build` makes the JSON files of it."""
