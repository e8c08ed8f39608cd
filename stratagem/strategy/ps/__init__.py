"""The parts of :class:`ParameterServerStrategy`."""
