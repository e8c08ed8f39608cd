"""What :class:`ParameterServerStrategy` is made of."""
