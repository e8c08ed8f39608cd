"""Estimators: a training described by functions; one call runs it in every task of a cluster."""
