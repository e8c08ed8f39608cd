"""A whole job in one thread, in virtual time, where network and disk fail by a seed: docs/design/simulation.md."""
