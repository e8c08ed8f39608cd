"""Reducing gradients over the ranks of a ring while backward runs: hooks, buckets, compression, SyncBatchNorm."""
