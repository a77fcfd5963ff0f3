"""Addresses that tenants' requests may not reach, by IANA's registries, in every notation."""

from __future__ import annotations

from ipaddress import IPv6Address, ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moiety_platform.errors import BadRequest
from moiety_platform.webhooks.addresses import AddressPolicy, CannotReach
from moiety_platform.webhooks.special_addresses import SPECIAL_IPV4, SPECIAL_IPV6, is_special
from moiety_platform.webhooks.webhook_client import WebhookClient

SPECIAL = [
    "0.0.0.0", "0.255.255.255", "10.1.2.3", "100.64.0.1", "100.127.255.255", "127.0.0.1", "127.255.255.254",
    "169.254.169.254", "172.16.0.1", "172.31.255.255", "192.0.0.8", "192.0.0.170", "192.0.2.1", "192.31.196.1",
    "192.52.193.1", "192.88.99.1", "192.168.1.1", "192.175.48.1", "198.18.0.1", "198.19.255.255", "198.51.100.1",
    "203.0.113.1", "224.0.0.1", "239.255.255.250", "240.0.0.1", "255.255.255.255",
    "::", "::1", "::7f00:1", "::8.8.8.8", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::ffff:0:127.0.0.1",
    "64:ff9b::127.0.0.1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "100::1", "2001::1",
    "2001:0:4136:e378::1", "2001:2::1", "2001:10::1", "2001:20::1", "2001:db8::1", "2002:7f00:1::1", "2002:a9fe:a9fe::",
    "2620:4f:8000::1",
    "3fff::1", "5f00::1", "fc00::1", "fd00:ec2::254", "fe80::1", "fe80::1%eth0", "febf::1", "fec0::1", "ff02::1",
]  # fmt: skip
PUBLIC = ["1.1.1.1", "9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0", "126.255.255.255", "128.0.0.0",
          "169.253.255.255", "172.15.255.255", "172.32.0.0", "192.0.1.0", "198.17.255.255", "198.20.0.0",
          "223.255.255.255", "2001:4860:4860::8888", "2001:200::1", "2606:4700::1111", "2a00:1450::1",
          "3ffe:ffff::1"]  # fmt: skip
SPELLINGS = [
    "127.1", "127.0.1", "2130706433", "0x7f000001", "0x7f.0.0.1", "017700000001", "0xa9fea9fe",
    "2852039166", "169.254.43518", "0", "0x0", "127.0.0.1.", "[::ffff:7f00:1]", "[0:0:0:0:0:ffff:169.254.169.254]",
    "[64:ff9b::7f00:1]", "[2002:7f00:1::]", "[::1]", "localhost", "LOCALHOST", "localhost.", "x.localhost",
]  # fmt: skip


@pytest.mark.parametrize("address", SPECIAL)
def test_an_address_of_special_purpose_is_known_as_such(address: str) -> None:
    assert is_special(ip_address(address))
    assert not AddressPolicy().allows(ip_address(address), "https")


@pytest.mark.parametrize("address", PUBLIC)
def test_addresses_beside_those_of_special_purpose_are_public(address: str) -> None:
    assert not is_special(ip_address(address))


@given(st.sampled_from([*SPECIAL_IPV4, *SPECIAL_IPV6]), st.data())
def test_every_address_of_a_special_network_is_special(network: object, data: st.DataObject) -> None:
    first, last = int(network.network_address), int(network.broadcast_address)  # type: ignore[attr-defined]
    address = type(network.network_address)(data.draw(st.integers(first, last)))  # type: ignore[attr-defined]
    assert is_special(address)


@given(st.integers(0, 2**32 - 1))
def test_no_ipv4_address_is_public_by_being_written_as_ipv6(address: int) -> None:
    for prefix in (0, 0xFFFF << 32, 0xFFFF << 48, 0x64FF9B << 96):
        assert is_special(IPv6Address(prefix | address))
    assert is_special(IPv6Address(0x2002 << 112 | address << 80))


@pytest.mark.parametrize("host", SPELLINGS)
async def test_a_special_address_is_refused_in_every_spelling_when_made_and_when_used(host: str) -> None:
    url = f"https://{host}/hook"
    with pytest.raises(BadRequest) as refused:
        AddressPolicy().check(url)
    assert refused.value.code in ("address_not_allowed", "invalid_request")
    async with WebhookClient(AddressPolicy()) as poster:
        with pytest.raises(CannotReach) as unreached:
            await poster.post(url, b"{}", {})
    assert unreached.value.code in ("address_not_allowed", "name_not_resolved")
