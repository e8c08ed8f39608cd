"""The worker's side of the ps: client and lanes, outgoing gradients, incoming weights, tables."""
