"""From where an issuer's keys may be fetched."""

import pytest

from cluster.router.tenancy.oidc.addresses import check_oidc


@pytest.mark.parametrize(
    "url",
    [
        "https://id.example",
        "https://id.example:8443/realms/acme",
        "http://127.0.0.1:9000",
        "http://[::1]:9000",
        "http://localhost",
    ],
)
def test_an_issuer_is_reached_by_tls_or_on_this_machine(url: str) -> None:
    check_oidc(url, None)
    check_oidc("https://id.example", url)


@pytest.mark.parametrize(
    "url",
    [
        "http://id.example",
        "http://10.0.0.1",
        "http://localhost.example",
        "ftp://127.0.0.1",
        "https://user:secret@id.example",
        "https://id.example#x",
        "https://id.example?x=1",
        "https://",
        "https://id.example:99999",
        "https://[::1",
        "https://id.example/\0",
        "https://id example",
    ],
)
def test_another_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="URL|https is wanted"):
        check_oidc(url, None)
    with pytest.raises(ValueError, match="URL|https is wanted"):
        check_oidc("https://id.example", url)


def test_keys_in_a_file_need_no_address() -> None:
    check_oidc("https://id.example", "/etc/keys.json")
