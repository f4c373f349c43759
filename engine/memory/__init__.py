"""KV memory of one rank: who owns which block (`BlockPool`) and the bytes themselves (`KVPool`)."""
