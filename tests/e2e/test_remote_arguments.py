"""Arguments of `connect` that cannot be meant are refused before anything is sent, by name, and no token is shown."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from experts_server import ExpertsServer
from moe_autograd.errors import ConfigError, CorruptDataError
from moe_autograd.remote import TLS, HedgePolicy, RetryPolicy, connect

NOBODY = "127.0.0.1:9"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"token": 123}, "expected token to be a text, a Path or None, got a int"),
        ({"token": b"secret"}, "expected token to be a text, a Path or None, got a bytes"),
        ({"tls": True}, r"expected tls to be a TLS or None, got True"),
        ({"tls": "ca.pem"}, r"expected tls to be .* got 'ca.pem'\. Pass TLS\(ca_file="),
        ({"retry": 5}, "expected retry to be a RetryPolicy or None, got 5"),
        ({"hedge": "no"}, "expected hedge to be True, False or a HedgePolicy, got 'no'"),
        ({"allow_missing": "no"}, "expected allow_missing to be True or False, got 'no'"),
        (
            {"max_tensor_bytes": 1e9},
            "expected max_tensor_bytes to be a positive whole number, got 1000000000.0",
        ),
        ({"max_tensor_bytes": True}, "expected max_tensor_bytes to be a positive whole number, got True"),
    ],
)
def test_another_type_is_a_type_error(arguments, message):
    with pytest.raises(TypeError, match=message):
        connect(NOBODY, **arguments)


@pytest.mark.parametrize("arguments", [{"timeout_s": "3"}, {"compression": 3}], ids=str)
def test_of_these_another_type_is_another_value(arguments):
    with pytest.raises(ValueError, match=r"expected .*, got '?3"):
        connect(NOBODY, **arguments)


@pytest.mark.parametrize(
    ("token", "message"),
    [
        (
            "s3cret-token\n",
            r"got '\\n' at position 12 of 13\. If it was read from a file, strip its line end",
        ),
        ("train s3cret", "got ' ' at position 5 of 12"),
        ("s3cr\u00e9t", "got '\u00e9' at position 4"),
        ("s3cret\0", r"got '\\x00' at position 6"),
        ("", "got 0 characters"),
        ("s3cret" * 1000, "got 6000 characters"),
    ],
)
def test_a_token_that_no_header_carries_is_refused_and_not_shown(tmp_path, token, message):
    with pytest.raises(ValueError, match=f"token: expected 1 to 4096 printable .*{message}") as refused:
        connect(NOBODY, token=token)
    (tmp_path / "token").write_text(f"s {token} more", encoding="utf-8")
    file = tmp_path / "placement.toml"
    file.write_text(f"addresses = ['{NOBODY}']\ntoken_file = 'token'")
    with pytest.raises(ConfigError, match="key 'token_file': token: expected") as refused_file:
        connect(file)
    assert "s3cr" not in f"{refused.value} {refused_file.value}"


@pytest.mark.parametrize("key", ["tokens", "tokne", "Token"])
def test_a_mistyped_key_shows_no_token(tmp_path, key):
    file = tmp_path / "placement.toml"
    file.write_text(f"addresses = ['{NOBODY}']\n{key} = 's3cret'")
    with pytest.raises(ConfigError, match="Did you mean 'token'") as refused:
        connect(file)
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize("addresses", [None, 3, b"127.0.0.1:31415", ("127.0.0.1", 31415)])
def test_what_is_no_address_is_a_type_error(addresses):
    with pytest.raises(TypeError, match="connect: expected host:port, several of them, or a file, got"):
        connect(addresses)


@pytest.mark.parametrize("max_tensor_bytes", [0, -1])
def test_a_limit_that_is_none_is_refused(max_tensor_bytes):
    with pytest.raises(ValueError, match="max_tensor_bytes: expected a positive whole number, got"):
        connect(NOBODY, max_tensor_bytes=max_tensor_bytes)


@pytest.mark.parametrize("timeout_s", [True, "5", 1e10, 1e300, 10**400])
def test_deadlines_that_grpc_does_not_know_are_refused(timeout_s):
    with pytest.raises(ValueError, match="timeout_s: expected a positive, finite number"):
        connect(NOBODY, timeout_s=timeout_s)


@pytest.mark.parametrize(
    "wrong",
    [
        {"patience_s": -1.0},
        {"patience_s": "10"},
        {"max_retries": -1},
        {"max_retries": 1.5},
        {"update_attempt_s": 0.0},
        {"initial_pause_s": float("nan")},
        {"max_pause_s": float("inf")},
        {"budget": None},
    ],
    ids=str,
)
def test_a_policy_of_retries_that_is_none_is_refused(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"RetryPolicy: expected {name} to be a finite .*, got {value!r}"):
        RetryPolicy(**wrong)


def test_what_switches_a_retry_off_is_allowed():
    assert RetryPolicy(patience_s=0, max_retries=0, budget=0, budget_per_success=0) is not None


def test_a_hedge_that_never_comes_and_a_name_that_no_host_has_are_refused():
    with pytest.raises(ValueError, match="HedgePolicy"):
        HedgePolicy(first_after_s=float("inf"))
    with pytest.raises(ValueError, match="TLS: expected a server_name, got an empty one"):
        TLS(server_name="")
    for name in ("a b", " a", "a\n", "localhost\0x"):
        with pytest.raises(ValueError, match="TLS: expected a server_name without blanks, got '"):
            TLS(server_name=name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ca_file": b"ca.pem"}, "expected ca_file to be a text, a Path or None, got a bytes"),
        ({"key_file": 3}, "expected key_file to be a text, a Path or None, got a int"),
        ({"server_name": 3}, "expected server_name to be a text or None, got 3"),
    ],
)
def test_certificates_of_another_type_are_a_type_error(arguments, message):
    with pytest.raises(TypeError, match=f"TLS: {message}"):
        TLS(**arguments)


@pytest.mark.parametrize(
    ("file", "error"), [("none", FileNotFoundError), ("", IsADirectoryError), ("a\0b", ValueError)]
)
def test_certificates_that_cannot_be_read_are_refused_by_name_before_anything_connects(file, error):
    for tls in (TLS(file), TLS(cert_file=file, key_file="none")):
        with pytest.raises(
            error, match=f"TLS: expected a readable file, got {re.escape(repr(file))} .* Check"
        ):
            connect(NOBODY, tls=tls)


@pytest.mark.parametrize(
    "address",
    [
        " a:1",
        "a:1 ",
        "a b:1",
        "[]:1",
        "[a]:1",
        "[127.0.0.1]:1",
        "::1:80",
        "[::1]",
        "http://a:1",
        "a:1/b",
        "u@a:1",
        "a,b:1",
        "a:\u0661",
        b"a:1",
        None,
        "x.TOML",
    ],
)
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(ValueError, match="address: expected host:port, got"):
        connect([address])


def test_a_tensor_above_the_clients_limit_is_not_asked_for_again():
    calls = []

    class Counting(nn.Linear):
        def forward(self, x):
            calls.append(1)
            return super().forward(x)

    with (
        ExpertsServer({"ffn.0": Counting(4, 4)}) as server,
        connect(server.address, max_tensor_bytes=63) as experts,
    ):
        with pytest.raises(
            CorruptDataError, match=r"at most 63 bytes.*raise the receiver's max_tensor_bytes"
        ):
            experts["ffn.0"](torch.ones(4, 4))
        assert len(calls) == 1
        with pytest.raises(CorruptDataError, match=r"state_dict.*at most 63 bytes") as refused:
            experts.state_dict()
        assert not hasattr(refused.value, "__notes__")  # of retries
