"""Array operations of a bounded KV cache: a folder each, its reference the definition."""
