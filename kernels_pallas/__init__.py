"""Array operations of a bounded KV cache: one folder per operation, its reference the definition."""
