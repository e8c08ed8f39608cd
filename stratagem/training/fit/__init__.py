"""The loops of ``fit`` and ``evaluate``: their batches and steps, what they count, what workers agree on."""
