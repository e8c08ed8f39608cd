"""What OpenSSL means, in words for the person at the terminal."""

from __future__ import annotations

import ssl

# By number of OpenSSL's X509_V_ERR_*.
_REFUSALS = {
    9: "the certificate is not valid yet; compare the clocks",
    10: "the certificate has expired",
    62: "it is the certificate of another task",
    **dict.fromkeys((2, 18, 19, 20, 21, 7, 30), "the certificate is of another certificate authority"),
}
_REASONS = {
    "KEY_VALUES_MISMATCH": "key and certificate do not belong together",
    "NO_START_LINE": "it is not PEM",
    "PEM_LIB": "it is not PEM",
    "NO_CERTIFICATE_OR_CRL_FOUND": "the authority's file holds no certificate",
    "BAD_PASSWORD_READ": "the key is encrypted; Stratagem takes keys without a password",
}
_ALERTS = {
    "UNKNOWN_CA": "it is of another certificate authority",
    "CERTIFICATE_EXPIRED": "it has expired",
    "CERTIFICATE_REQUIRED": "there was none",
    "BAD_CERTIFICATE": "it is not valid",
    "CERTIFICATE_UNKNOWN": "it is not valid",
    "UNSUPPORTED_CERTIFICATE": "it is not valid",
    "DECRYPT_ERROR": "it is of another certificate authority of the same name",
}


def reason_of(error: ssl.SSLError) -> str:
    """Why a certificate or a file was refused here."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _REFUSALS.get(error.verify_code, error.verify_message)
    return _REASONS.get(error.reason or "", (error.reason or str(error)).replace("_", " ").lower())


def refusal_of(error: ssl.SSLError) -> str:
    """Why the other side refused our certificate; empty when the error is no such refusal."""
    reason = error.reason or ""
    return next((words for alert, words in _ALERTS.items() if reason.endswith(f"ALERT_{alert}")), "")


def is_no_tls(error: ssl.SSLError) -> bool:
    """Whether the other side answered, but not in TLS."""
    return error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG")
