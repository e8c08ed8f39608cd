"""The members of the cluster, and the session streams that tell each task about them."""
