"""A certificate for one measurement on loopback, made by the command ``openssl``."""

from __future__ import annotations

import subprocess
from pathlib import Path


class CertificateError(Exception):
    """No certificate could be made; says why."""


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1 and its key, as files in ``folder``.

    Raises:
        CertificateError: there is no ``openssl``, or it failed.
    """
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise CertificateError("expected the command openssl to make a certificate for --tls, found none") from None
    if done.returncode != 0:
        raise CertificateError(f"openssl made no certificate: {done.stderr.strip()[-500:]}")
    return certificate, key
