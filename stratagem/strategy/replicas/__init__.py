"""Several replicas in one process: threads that meet, copies of models, a value for each replica."""
