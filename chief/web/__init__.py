"""What the chief serves over HTTP: the job's page and its metrics."""
