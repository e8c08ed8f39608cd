"""Distributed datasets."""
