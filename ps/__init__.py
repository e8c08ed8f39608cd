"""The parameter server: shards of variables and optimizer state, exactly-once updates, immutable versions."""
