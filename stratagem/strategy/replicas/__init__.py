"""Several replicas in one process: threads that meet, copies of models, values of each."""
