"""The chief's clients of the ps."""
