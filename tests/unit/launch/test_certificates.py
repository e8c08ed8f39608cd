"""Certificates say who their owner is; their files are private from the first byte on and are never overwritten."""

from __future__ import annotations

import datetime
import os
import stat
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from stratagem.cli.__main__ import stratagem
from stratagem.errors import ConfigurationError
from stratagem.launch import certificates
from stratagem.launch.certificates import Authority, make_throw_away
from stratagem.rpc.security import make_security
from tests.file_sizes import file_size_limit


def invoke(*arguments: object) -> str:
    return CliRunner().invoke(stratagem, [str(each) for each in arguments], catch_exceptions=False).output


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "certs"
    assert "ca.crt" in invoke("certs", "init", "--dir", path)
    return path


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def names_of(path: Path) -> list[str]:
    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    return [
        str(name.value) for name in certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    ]


def test_init_and_issue_make_what_tasks_need(folder: Path) -> None:
    assert "for worker:1, 365 days" in invoke("certs", "issue", "--dir", folder, "chief:0", "worker:1", "operator")
    expected = {"ca", "chief-0", "worker-1", "operator"}
    assert {path.name for path in folder.iterdir()} == {f"{n}.{end}" for n in expected for end in ("crt", "key")}
    for identity in ("chief:0", "worker:1", "operator"):
        assert make_security(identity, str(folder), "").identity == identity


def test_keys_are_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_throw_away(tmp_path / "certs", ["worker:0"])
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "certs") == 0o700
    assert mode_of(tmp_path / "certs" / "worker-0.key") == 0o600
    assert mode_of(tmp_path / "certs" / "worker-0.crt") == 0o644


def test_a_certificate_names_its_task_and_hosts(folder: Path) -> None:
    invoke("certs", "issue", "--dir", folder, "ps:0", "--host", "ps.example.org", "--host", "10.0.0.7")
    assert names_of(folder / "ps-0.crt") == [
        *("stratagem:ps:0", "ps-0.stratagem.internal", "localhost", "127.0.0.1", "::1", "ps.example.org", "10.0.0.7"),
    ]
    certificate = x509.load_pem_x509_certificate((folder / "ps-0.crt").read_bytes())
    uses = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(uses) == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}
    limits = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    assert limits.critical and not limits.value.ca


def test_nothing_is_overwritten_unless_it_is_renewed(folder: Path) -> None:
    invoke("certs", "issue", "--dir", folder, "ps:0")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    for arguments in (["init"], ["issue", "ps:0"]):
        with pytest.raises(ConfigurationError, match="is there already, and nothing is overwritten"):
            invoke("certs", arguments[0], "--dir", folder, *arguments[1:])
    (folder / "ps-0.key").unlink()
    with pytest.raises(ConfigurationError, match="is there already"):
        invoke("certs", "issue", "--dir", folder, "ps:0")  # half of a pair is not touched either
    assert not (folder / "ps-0.key").exists() and (folder / "ps-0.crt").read_bytes() == files["ps-0.crt"]
    invoke("certs", "issue", "--dir", folder, "ps:0", "--renew")
    assert (folder / "ps-0.crt").read_bytes() != files["ps-0.crt"] and mode_of(folder / "ps-0.key") == 0o600
    assert {path.name for path in folder.iterdir()} == set(files)
    assert make_security("ps:0", str(folder), "").tls is not None


@pytest.mark.parametrize("identity", ["worker", "worker:", "worker:-1", "boss:0", "operator:0", "../worker:0"])
def test_a_name_that_is_no_task_is_refused(folder: Path, identity: str) -> None:
    with pytest.raises(ConfigurationError, match="expected a task like 'worker:0'"):
        invoke("certs", "issue", "--dir", folder, identity)


@pytest.mark.parametrize("host", ["ps-0.stratagem.internal", "PS-0.Stratagem.Internal.", "*.internal", "*", "", "n:80"])
def test_a_host_name_cannot_be_a_tasks_name(folder: Path, host: str) -> None:
    with pytest.raises(ConfigurationError, match="cannot be a host name"):
        invoke("certs", "issue", "--dir", folder, "worker:0", "--host", host)
    assert not (folder / "worker-0.key").exists()


def test_where_nothing_can_be_written_is_said(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"cannot write .*file/certs/ca\.key: Not a directory"):
        invoke("certs", "init", "--dir", tmp_path / "file" / "certs")
    (folder / "ps-0.key").mkdir()
    with pytest.raises(ConfigurationError, match=r"cannot write .*ps-0\.key: Is a directory"):
        invoke("certs", "issue", "--renew", "--dir", folder, "ps:0")
    assert {path.name for path in folder.iterdir()} == {"ca.crt", "ca.key", "ps-0.key"}


def test_of_what_was_not_written_to_its_end_nothing_stays_in_the_way(tmp_path: Path) -> None:
    authority = Authority.create(1)
    with file_size_limit(100), pytest.raises(ConfigurationError, match=r"cannot write .*ca\.key: File too large"):
        authority.save(tmp_path, with_key=True)
    assert not list(tmp_path.iterdir())
    authority.save(tmp_path, with_key=True)


def test_without_an_authority_or_its_key_nothing_is_issued(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="certs init"):
        invoke("certs", "issue", "--dir", tmp_path / "empty", "worker:0")
    other = Authority.create(1)
    (folder / "ca.crt").unlink()
    other.save(folder, with_key=False)
    with pytest.raises(ConfigurationError, match=r"ca\.key in .* is not the key of ca\.crt"):
        invoke("certs", "issue", "--dir", folder, "worker:0")
    (folder / "ca.key").write_text("no key")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        invoke("certs", "issue", "--dir", folder, "worker:0")


def test_init_leaves_nothing_beside_an_authority_that_is_there(folder: Path) -> None:
    (folder / "ca.key").unlink()  # as on the machine of a task
    with pytest.raises(ConfigurationError, match=r"ca\.crt is there already"):
        invoke("certs", "init", "--dir", folder)
    assert not (folder / "ca.key").exists()


def test_a_throw_away_authority_leaves_no_key(tmp_path: Path) -> None:
    make_throw_away(tmp_path / "certs", ["chief:0"])
    assert {path.name for path in (tmp_path / "certs").iterdir()} == {
        *("ca.crt", "chief-0.crt", "chief-0.key", "operator.crt", "operator.key"),
    }


def test_without_cryptography_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "stratagem.launch.certificates")
    monkeypatch.setitem(sys.modules, "cryptography", None)
    for arguments in (["init"], ["issue", "worker:0"]):
        with pytest.raises(ConfigurationError, match=r"pip install 'stratagem\[tls\]'"):
            invoke("certs", arguments[0], "--dir", tmp_path, *arguments[1:])


def test_missing_and_broken_files_are_named_with_the_way_out(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no TLS for ps:0: .*ps-0\.crt.*`stratagem certs issue ps:0`"):
        make_security("ps:0", str(folder), "")
    invoke("certs", "issue", "--dir", folder, "ps:0", "worker:0")
    (folder / "ps-0.key").write_bytes((folder / "worker-0.key").read_bytes())
    with pytest.raises(ConfigurationError, match="do not belong together"):
        make_security("ps:0", str(folder), "")
    (folder / "ps-0.key").write_text("no key")
    with pytest.raises(ConfigurationError, match=r"ps-0\.key"):
        make_security("ps:0", str(folder), "")
    with pytest.raises(ConfigurationError, match="No such file"):
        make_security("ps:0", str(folder / "nowhere"), "")


def test_an_authority_that_has_expired_takes_its_certificates_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificates, "_EARLY", datetime.timedelta(days=9))
    (authority := Authority.create(-1)).save(tmp_path, with_key=True)
    authority.issue("ps:0", (), tmp_path, days=1)
    with pytest.raises(ConfigurationError, match=r"authority .*ca\.crt has expired .*`stratagem certs init`"):
        make_security("ps:0", str(tmp_path), "")
    with pytest.raises(ConfigurationError, match=r"authority .*ca\.crt has expired"):
        invoke("certs", "issue", "--dir", tmp_path, "--renew", "ps:0")


def test_a_key_that_others_can_read_and_a_near_end_are_worth_warnings(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    invoke("certs", "issue", "--dir", folder, "ps:0")
    make_security("ps:0", str(folder), "")
    assert not caplog.records
    (folder / "ps-0.key").chmod(0o640)
    make_security("ps:0", str(folder), "")
    assert "chmod 600" in caplog.text
    invoke("certs", "issue", "--dir", folder, "ps:0", "--renew", "--days", 2)
    make_security("ps:0", str(folder), "")
    assert "ends in 2.0 days" in caplog.text
