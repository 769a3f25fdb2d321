"""Context axis: sequence shards, and attention across ranks."""
