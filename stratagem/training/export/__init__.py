"""Trained models as programs that plain PyTorch runs."""
