"""The loops of ``fit`` and ``evaluate``: their batches, their steps, what they count and what workers agree on."""
