"""Who is in the cluster, and the streams that say so."""
