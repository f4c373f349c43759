"""Who may ask the router: API keys, what each may do, and how much of it.

Keys are found by their hashes (`record`, `file`, `source`), their use is counted in buckets
(`bucket`, `ledger`) that the HTTP processes of one router share (`service`), and whoever waits for
something stands in a `line`. Nothing here knows HTTP: `router.http.access.gate` does.
"""
