"""Which URLs and which addresses an event is never sent to."""

import ipaddress

import pytest

from nightjar.jobs.webhooks.addresses import (
    AddressGuard,
    callable_target,
    is_callable,
    is_public,
    resolve,
)
from nightjar.jobs.webhooks.errors import (
    ForbiddenAddressError,
    UnresolvedNameError,
    UnusableUrlError,
)
from nightjar.jobs.webhooks.targets import Target, parse_target

PUBLIC = ["93.184.216.34", "2606:2800:220:1::1", "::ffff:8.8.8.8", "64:ff9b::808:808"]
PUBLIC += ["2002:808:808::1"]
PRIVATE = ["10.0.0.1", "172.16.0.1", "192.168.1.1", "127.0.0.1", "127.255.0.3", "::1", "fd00::1"]
PRIVATE += ["::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::1"]
NEVER = ["169.254.169.254", "fe80::1", "224.0.0.1", "ff02::1", "0.0.0.0", "::", "255.255.255.255"]  # noqa: S104
NEVER += ["240.0.0.1", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "2002:a9fe:a9fe::1"]
NEVER += ["::ffff:0.0.0.0", "64:ff9b:1::a00:1"]
NEITHER = ["100.64.0.1", "192.0.2.1", "198.18.0.1", "2001:db8::1", "fec0::1", "2001:0:808:808::1"]
NEITHER += ["::7f00:1", "192.88.99.1", "100::1"]


@pytest.mark.parametrize("text", PUBLIC)
def test_public_addresses_are_called(text: str) -> None:
    address = ipaddress.ip_address(text)
    assert is_public(address)
    assert is_callable(address)


@pytest.mark.parametrize("text", PRIVATE)
def test_private_addresses_are_called_only_if_allowed(text: str) -> None:
    address = ipaddress.ip_address(text)
    assert not is_public(address)
    assert is_callable(address)


@pytest.mark.parametrize("text", NEVER)
def test_metadata_multicast_and_reserved_addresses_are_never_called(text: str) -> None:
    address = ipaddress.ip_address(text)
    assert not is_public(address)
    assert not is_callable(address)


@pytest.mark.parametrize("text", NEITHER)
def test_other_special_addresses_are_not_public(text: str) -> None:
    assert not is_public(ipaddress.ip_address(text))


LOOPBACK = [
    "127.0.0.1",
    "127.1",
    "2130706433",
    "0x7f000001",
    "0x7f.1",
    "017700000001",
    "0177.0.0.1",
]


@pytest.mark.parametrize("host", [*LOOPBACK, "[::1]", "[::ffff:7f00:1]", "localhost", "0"])
def test_each_spelling_of_this_machine_is_refused(host: str) -> None:
    """With the system's own resolver, which knows all of these spellings."""
    with pytest.raises(ForbiddenAddressError, match="not public"):
        callable_target(f"https://{host}/hook", AddressGuard())


def test_one_private_address_of_several_is_enough_to_refuse() -> None:
    guard = AddressGuard(resolver=lambda host, port: ["93.184.216.34", "10.0.0.8"])
    with pytest.raises(ForbiddenAddressError) as raised:
        guard.addresses("two.example", 443)
    assert "10.0.0.8" not in str(raised.value), "the network here is nobody's business"


@pytest.mark.parametrize("found", [[], ["fe80::1%eth0"], ["no address"]])
def test_what_a_resolver_says_is_not_trusted(found: list[str]) -> None:
    guard = AddressGuard(resolver=lambda host, port: found)
    with pytest.raises((UnresolvedNameError, ForbiddenAddressError)):
        guard.addresses("odd.example", 443)


@pytest.mark.parametrize("name", ["a..b", "x" * 64 + ".example"])
def test_a_name_that_does_not_resolve(name: str) -> None:
    with pytest.raises(UnresolvedNameError, match="does not resolve"):
        resolve(name, 443)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://example.org/", "https"),
        ("ftp://example.org/", "https"),
        ("javascript:alert(1)", "https"),
        ("https:///path", "no usable host"),
        ("https://user@example.org/", "no user"),
        ("https://user:word@example.org/", "no user"),
        ("https://example.org/#part", "fragment"),
        ("https://example.org:22/", "port"),
        ("https://example.org:99999/", "no URL"),
        ("https://example.org:0/", "port"),
        ("https://example.org:x/", "no URL"),
        ("https://[::1/", "no URL"),
        ("https://[fe80::1%25eth0]/", "no usable host"),
        ("https://exa mple.org/", "printable"),
        ("https://example.org/\r\nHost: other", "printable"),
        ("https://example.org\\@127.0.0.1/", "printable"),
        ("https://exämple.org/", "xn--"),
        ("https://-a.example/", "no usable host"),
        ("https://example.org/" + "x" * 2_048, "2048"),
    ],
)
def test_urls_that_are_refused_with_the_reason(url: str, why: str) -> None:
    with pytest.raises(UnusableUrlError, match=why):
        parse_target(url, allow_http=False)


@pytest.mark.parametrize(
    ("url", "target", "authority"),
    [
        ("https://Example.org", Target("https", "example.org", 443, "/"), "example.org"),
        ("https://a.b:8443/x?y=1", Target("https", "a.b", 8443, "/x?y=1"), "a.b:8443"),
        ("http://[2606::1]:80/", Target("http", "2606::1", 80, "/"), "[2606::1]"),
        ("http://10.0.0.1:9000/", Target("http", "10.0.0.1", 9000, "/"), "10.0.0.1:9000"),
    ],
)
def test_a_url_is_taken_apart_once(url: str, target: Target, authority: str) -> None:
    assert parse_target(url, allow_http=True) == target
    assert target.authority == authority
