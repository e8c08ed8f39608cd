"""Everything that touches gRPC: codec, channels, servers, lanes, sessions, errors on the wire."""
