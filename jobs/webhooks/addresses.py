"""Which addresses an event may be sent to.

A tenant chooses the URL, and this machine calls it. Without a guard a tenant could reach what only
this machine reaches: its own services, its network, a cloud's metadata. So a name is resolved once
for each attempt, all of its addresses are checked, and the connection is made to one of these very
addresses. A name that resolves to another address later gains nothing.
"""

import ipaddress
import socket
from collections.abc import Callable, Sequence

from nightjar.jobs.webhooks.errors import ForbiddenAddressError, UnresolvedNameError
from nightjar.jobs.webhooks.targets import Target, parse_target

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolver = Callable[[str, int], Sequence[str]]

_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_LOCAL_NAT64 = ipaddress.IPv6Network("64:ff9b:1::/48")
_OLD_RELAYS = ipaddress.IPv4Network("192.88.99.0/24")
_MOST_ADDRESSES = 64
_PRIVATE_HINT = "; NIGHTJAR_WEBHOOK_ALLOW_PRIVATE=true allows private ones"


def resolve(host: str, port: int) -> list[str]:
    """The addresses of a name, as the system knows them; raises UnresolvedNameError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise UnresolvedNameError(f"the name {host!r} does not resolve") from error
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class AddressGuard:
    """Gives the addresses of a host, if an event may be sent there.

    Args:
        allow_private: Also allow private and loopback addresses. Link-local addresses (a cloud's
            metadata), multicast and reserved ones stay forbidden.
        resolver: Gives the addresses of a name or of an address in any spelling. By default the
            system's resolver.
    """

    def __init__(self, *, allow_private: bool = False, resolver: Resolver = resolve) -> None:
        self.allow_private = allow_private
        self._resolver = resolver

    def addresses(self, host: str, port: int) -> list[str]:
        """The addresses that may be called; raises ForbiddenAddressError, UnresolvedNameError."""
        found = self._resolver(host, port)[:_MOST_ADDRESSES]
        if not found:
            raise UnresolvedNameError(f"the name {host!r} does not resolve")
        is_allowed = is_callable if self.allow_private else is_public
        for text in found:
            try:
                allowed = is_allowed(ipaddress.ip_address(text))
            except ValueError:  # such as one with a zone
                allowed = False
            if not allowed:
                hint = "" if self.allow_private else _PRIVATE_HINT
                raise ForbiddenAddressError(
                    f"the host {host!r} has an address that is not public, and is not called{hint}"
                )
        return list(found)


def callable_target(url: str, guard: AddressGuard) -> tuple[Target, list[str]]:
    """A URL taken apart, and the addresses at which it may be called; raises SendingError."""
    target = parse_target(url, allow_http=guard.allow_private)
    return target, guard.addresses(target.host, target.port)


def is_public(address: Address) -> bool:
    """Whether the internet routes to this address, and to every address that is embedded in it."""
    inner = _embedded(address)
    if inner is not None:
        return is_public(inner)
    if isinstance(address, ipaddress.IPv6Address) and address not in _GLOBAL_UNICAST:
        return False
    if isinstance(address, ipaddress.IPv4Address) and address in _OLD_RELAYS:
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def is_callable(address: Address) -> bool:
    """The same, or whether it is a private or a loopback address."""
    inner = _embedded(address)
    if inner is not None:
        return is_callable(inner)
    if address.is_link_local or address.is_multicast or address.is_unspecified:
        return False
    if address.is_loopback or is_public(address):
        return True
    return address.is_private and not address.is_reserved and address not in _LOCAL_NAT64


def _embedded(address: Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address that a packet to this IPv6 address ends at."""
    if isinstance(address, ipaddress.IPv4Address):
        return None
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    return None
