"""Estimators: a training described by functions, run in every task of a cluster by one call."""
