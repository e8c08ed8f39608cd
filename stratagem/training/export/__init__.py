"""Trained models as programs that run on plain PyTorch."""
