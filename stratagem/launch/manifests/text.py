"""Objects as YAML. Pure, no I/O."""

from __future__ import annotations

import re
from collections.abc import Sequence

import yaml

from stratagem.launch.manifests.pod import Object


class _Dumper(yaml.SafeDumper):
    """Quotes also what is text to PyYAML alone: kubectl and compose take 1e-4, 12e4567 and 0o17 for numbers, y for
    true."""


_NUMBER = re.compile(r"[-+.]*\d[\da-fobx_.+-]*$", re.IGNORECASE)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+.0123456789"))
_Dumper.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("[yYnN]$"), list("yYnN"))


def to_yaml(documents: Sequence[Object]) -> str:
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120)
