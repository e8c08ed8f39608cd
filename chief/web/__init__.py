"""What the chief serves over HTTP: the page of the job, and its metrics."""
