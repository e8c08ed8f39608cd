"""Launchers: start the processes of a cluster and keep them running."""
