"""The parameter server: shards of variables and their optimizer state, applied exactly once, served as immutable versions."""
