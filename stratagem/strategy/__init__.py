"""The strategies."""

from stratagem.strategy import default as default
