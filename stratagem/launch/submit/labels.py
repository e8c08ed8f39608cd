"""Labels of a job: what Kubernetes accepts, on every target alike. Pure, no I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping

from stratagem.errors import ConfigurationError

MAX_LABELS = 64
_MAX_NAME, _MAX_PREFIX = 63, 253
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?")
_PREFIX = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
_RESERVED = ("kubernetes.io", "k8s.io", "stratagem.dev", "app.kubernetes.io")


def check_labels(labels: object) -> dict[str, str]:
    """The labels, if they are such.

    The rules are those of Kubernetes: a key is ``name`` or ``prefix/name``, the name and the value at most 63 letters,
    digits, "-", "_" and ".", with a letter or digit at both ends (a value may be empty), the prefix a DNS name.

    Raises:
        ConfigurationError: names the label, and the rule that it breaks.
    """
    if not isinstance(labels, Mapping):
        raise ConfigurationError(f"expected job_labels like {{'team': 'vision'}}, got {labels!r}")
    if len(labels) > MAX_LABELS:
        raise ConfigurationError(f"expected at most {MAX_LABELS} job_labels, got {len(labels)}")
    for key, value in labels.items():
        _check_key(key)
        if not isinstance(value, str):
            raise ConfigurationError(
                f"expected text as the value of the label {key!r}, got {value!r}; write {str(value)!r}"
            )
        if value and (len(value) > _MAX_NAME or not _NAME.fullmatch(value)):
            raise ConfigurationError(f"the label {key}={value!r} has no valid value: {_rule('it')}")
    return dict(labels)


def _check_key(key: object) -> None:
    if not isinstance(key, str) or not key:
        raise ConfigurationError(f"expected text as the key of a label, got {key!r}")
    prefix, slash, name = key.rpartition("/")
    if len(name) > _MAX_NAME or not _NAME.fullmatch(name):
        raise ConfigurationError(f"the label {key!r} has no valid key: {_rule('its name')}")
    if slash and (len(prefix) > _MAX_PREFIX or not _PREFIX.fullmatch(prefix)):
        raise ConfigurationError(
            f"the label {key!r} has no valid prefix: expected a DNS name in lower case, for example example.com/team"
        )
    if prefix in _RESERVED or prefix.endswith((".kubernetes.io", ".k8s.io")):
        raise ConfigurationError(
            f"the label {key!r} is not yours to give: {prefix}/ is reserved; choose another prefix"
        )


def _rule(what: str) -> str:
    return f"{what} takes at most {_MAX_NAME} letters, digits, '-', '_' and '.', with a letter or digit at both ends"
